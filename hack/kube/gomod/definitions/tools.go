//go:build tools

// Package tools names what is used of these modules, so that `go mod tidy` keeps them pinned: the definitions that Kueue
// brings, and the types that Volcano's are generated from.
package tools

import (
	_ "sigs.k8s.io/controller-tools/cmd/controller-gen"
	_ "sigs.k8s.io/kueue/apis/kueue/v1beta2"
	_ "volcano.sh/apis/pkg/apis/scheduling/v1beta1"
)
