// SPDX-License-Identifier: Apache-2.0

// Package bpf is the datapath: programs and maps in C, and what bpf2go makes
// of them. The contract between both languages is masq.h.
package bpf

//go:generate go tool bpf2go -cc $CLANG -strip $LLVM_STRIP -target bpfel,bpfeb -type limit -type family -type direction -type verdict -type flow_state -type cidr_verdict -type uplink_flag -type fast_path_flag -type ways -type fast_path_config -type node_address -type port_class_id -type sweep_mode -type sweep_request -type event Masq masq.bpf.c -- -O2 -g -Wall -Werror -mcpu=v2 -I$BPF_INCLUDE
