module ip-masq-agent/test/bench

go 1.26.0

require (
	github.com/cilium/ebpf v0.22.0
	github.com/vishvananda/netlink v1.3.1
	golang.org/x/sys v0.50.0
	ip-masq-agent v0.0.0
)

require github.com/vishvananda/netns v0.0.5 // indirect

replace ip-masq-agent => ../..

tool github.com/cilium/ebpf/cmd/bpf2go
