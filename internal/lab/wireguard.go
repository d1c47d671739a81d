// SPDX-License-Identifier: Apache-2.0

package lab

import (
	"bytes"
	"crypto/ecdh"
	"encoding/binary"

	"github.com/vishvananda/netlink"
	"github.com/vishvananda/netlink/nl"
	"golang.org/x/sys/unix"
)

const wireGuardPort = 51820

// configureWireGuard gives one end of a WireGuard tunnel its key and its peer, to
// which everything goes: include/uapi/linux/wireguard.h.
func (ns *Namespace) configureWireGuard(link string, i int) error {
	private, err := wireGuardKey(i)
	if err != nil {
		return err
	}
	peer, err := wireGuardKey(1 - i)
	if err != nil {
		return err
	}
	return ns.Do(func() error {
		family, err := netlink.GenlFamilyGet(unix.WG_GENL_NAME)
		if err != nil {
			return err
		}
		request := nl.NewNetlinkRequest(int(family.ID), unix.NLM_F_ACK)
		request.AddData(genericHeader{unix.WG_CMD_SET_DEVICE, unix.WG_GENL_VERSION})
		request.AddData(nl.NewRtAttr(unix.WGDEVICE_A_IFNAME, nl.ZeroTerminated(link)))
		request.AddData(nl.NewRtAttr(unix.WGDEVICE_A_PRIVATE_KEY, private.Bytes()))
		request.AddData(nl.NewRtAttr(unix.WGDEVICE_A_LISTEN_PORT, nl.Uint16Attr(wireGuardPort)))
		peers := nl.NewRtAttr(unix.WGDEVICE_A_PEERS|unix.NLA_F_NESTED, nil)
		one := peers.AddRtAttr(unix.NLA_F_NESTED, nil)
		one.AddRtAttr(unix.WGPEER_A_PUBLIC_KEY, peer.PublicKey().Bytes())
		one.AddRtAttr(unix.WGPEER_A_ENDPOINT, socketAddress(underlay[1-i].V4.As4(), wireGuardPort))
		allowed := one.AddRtAttr(unix.WGPEER_A_ALLOWEDIPS|unix.NLA_F_NESTED, nil)
		for family, length := range map[uint16]int{unix.AF_INET: 4, unix.AF_INET6: 16} {
			all := allowed.AddRtAttr(unix.NLA_F_NESTED, nil)
			all.AddRtAttr(unix.WGALLOWEDIP_A_FAMILY, nl.Uint16Attr(family))
			all.AddRtAttr(unix.WGALLOWEDIP_A_IPADDR, make([]byte, length))
			all.AddRtAttr(unix.WGALLOWEDIP_A_CIDR_MASK, []byte{0})
		}
		request.AddData(peers)
		_, err = request.Execute(unix.NETLINK_GENERIC, 0)
		return err
	})
}

// genericHeader is a struct genlmsghdr: command, version, and two octets that have
// to be 0, which they are not in nl.Genlmsg.
type genericHeader [4]byte

func (h genericHeader) Len() int          { return len(h) }
func (h genericHeader) Serialize() []byte { return h[:] }

// wireGuardKey is the private key of one end. It protects nothing.
func wireGuardKey(i int) (*ecdh.PrivateKey, error) {
	return ecdh.X25519().NewPrivateKey(bytes.Repeat([]byte{byte(i + 1)}, 32))
}

// socketAddress is a struct sockaddr_in.
func socketAddress(addr [4]byte, port uint16) []byte {
	b := binary.NativeEndian.AppendUint16(nil, unix.AF_INET)
	b = binary.BigEndian.AppendUint16(b, port)
	return append(append(b, addr[:]...), make([]byte, 8)...)
}
