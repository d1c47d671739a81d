// SPDX-License-Identifier: Apache-2.0

// Package manifests holds tests of what deploy/ has: manifests, kustomizations
// and the Helm chart. They need no cluster.
package manifests
