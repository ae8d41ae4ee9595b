//go:build tools

// Package tools names what is built from this module, so that `go mod tidy` keeps its dependencies pinned.
package tools

import _ "github.com/prometheus/prometheus/cmd/promtool"
