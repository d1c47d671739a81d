// SPDX-License-Identifier: Apache-2.0

package bpf

// Clang is the compiler of the committed objects.
const Clang = "19.1.7"
