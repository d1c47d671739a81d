// SPDX-License-Identifier: Apache-2.0

package bench

//go:generate go tool bpf2go -cc $CLANG -strip $LLVM_STRIP -target bpfel,bpfeb generator generator.bpf.c -- -O2 -g -Wall -Werror -mcpu=v2 -I$BPF_INCLUDE
