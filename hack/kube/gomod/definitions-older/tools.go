//go:build tools

// Package tools names what is used of this module: the definitions of a Kueue that has no v1beta2.
package tools

import _ "sigs.k8s.io/kueue/apis/kueue/v1beta1"
