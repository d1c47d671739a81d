// SPDX-License-Identifier: Apache-2.0

package kernels_test

import (
	"os"
	"slices"
	"strings"
	"testing"

	"github.com/cilium/ebpf/features"

	"ip-masq-agent/internal/api"
	"ip-masq-agent/internal/lab"
	"ip-masq-agent/loader"
)

// tunnelMTU fits through all of them.
const tunnelMTU = 1280

// tunnels are the shapes whose frames begin with an IP header.
func tunnels() []lab.Shape {
	return []lab.Shape{lab.IPIP, lab.SIT, lab.GRE, lab.IP6Tunnel, lab.IP6GRE}
}

// TestUplinkShapes has a pod talk through uplinks of all kinds. Outside of the
// guests there is only one that this machine's kernel has for sure; test/parity
// has more of those.
func TestUplinkShapes(t *testing.T) {
	shapes := []lab.Shape{lab.VXLAN}
	if os.Getenv("KERNEL_GUEST") == "true" {
		shapes = append([]lab.Shape{lab.VLAN, lab.TaggedVLAN, lab.AllTagged, lab.Bond, lab.WireGuard}, tunnels()...)
	}
	for _, shape := range shapes {
		t.Run(string(shape), func(t *testing.T) {
			n := &node{Lab: lab.New(t, lab.Options{Pods: 1, RoutedPods: -1, PodMTU: tunnelMTU, OutsideMTU: tunnelMTU, SecondUplink: true, Shape: shape})}
			if !n.served(t, shape) {
				return
			}
			n.checkShape(t, shape)
			n.checkNoDrops(t)
			n.stop(t)
			n.cleanUp(t)
		})
	}
}

// served starts the datapath, or finds the shape refused: IP tunnels before Linux
// 5.14, where programs cannot read what arrives through them.
func (n *node) served(t *testing.T, shape lab.Shape) bool {
	t.Helper()
	version, err := features.LinuxVersionCode()
	if err != nil {
		t.Fatal(err)
	}
	refused := version < 5<<16|14<<8 && slices.Contains(tunnels(), shape)
	if !refused {
		n.startWith(t, options(t))
		n.checkServed(t, shape)
		return true
	}
	err = n.Node.Do(func() (err error) {
		if n.datapath, err = loader.New(options(t)); err != nil {
			return err
		}
		return n.sync(t)
	})
	if err == nil || !strings.Contains(err.Error(), "up1: its frames cannot be read") {
		t.Errorf("got %v, want a refusal", err)
	}
	n.stop(t)
	n.cleanUp(t)
	return false
}

// checkServed checks that a port is left alone, and that what a device stands on
// is served beside it.
func (n *node) checkServed(t *testing.T, shape lab.Shape) {
	t.Helper()
	status, err := n.datapath.Status()
	if err != nil {
		t.Fatal(err)
	}
	var names []string
	for _, i := range status.Interfaces {
		names = append(names, i.Name)
	}
	want := []string{"eth0", "eth1", "up1"}
	if shape == lab.Bond {
		want = []string{"eth0", "up1"}
	}
	slices.Sort(names)
	if !slices.Equal(names, want) {
		t.Errorf("serves %v, want %v", names, want)
	}
}

// checkShape checks that what the pod says through the uplink comes from its
// address, is answered, and is translated once: not again by what the device
// stands on.
func (n *node) checkShape(t *testing.T, shape lab.Shape) {
	t.Helper()
	flows := 0
	for _, is6 := range []bool{false, true} {
		if is6 && shape == lab.IPIP {
			continue
		}
		remote := n.ViaUplink2.Addr(is6)
		for _, network := range []string{"udp", "tcp"} {
			conn := n.dial(t, network, remote)
			if want := n.Uplink2.Addr(is6); conn.Seen.Addr() != want {
				t.Errorf("%s to %s: comes from %s, want %s", network, remote, conn.Seen, want)
			}
			if _, err := conn.Exchange(string(make([]byte, 4000))); err != nil {
				t.Errorf("%s to %s, in parts: %v", network, remote, err)
			}
			flows++
		}
		n.ping(t, remote)
		flows++
	}
	translations := 0
	if err := n.datapath.EachTranslation(func(tr api.Translation) {
		if lab.IsPod(tr.Src) { // the node's own tunnel packets have an entry, too
			translations++
		}
	}); err != nil {
		t.Fatal(err)
	}
	if translations != flows {
		t.Errorf("%d translations of %d flows", translations, flows)
	}
}
