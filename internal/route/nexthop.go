// SPDX-License-Identifier: Apache-2.0

package route

import (
	"encoding/binary"

	"github.com/vishvananda/netlink/nl"
	"golang.org/x/sys/unix"
)

// Nexthop objects stand between routes and links. With nexthop_compat_mode, the
// default, the kernel spells them out in the route; without it the route names
// only an id.

const (
	sizeofNhmsg      = 8 // struct nhmsg of include/uapi/linux/nexthop.h
	sizeofGroupEntry = 8 // struct nexthop_grp, the id in front
)

// nexthop is one object: a way, or a group of other objects.
type nexthop struct {
	hop
	group []uint32
}

func decodeNexthop(m []byte) (id uint32, n nexthop) {
	if len(m) < sizeofNhmsg {
		return 0, nexthop{}
	}
	attrs, err := nl.ParseRouteAttr(m[sizeofNhmsg:])
	if err != nil {
		return 0, nexthop{}
	}
	for _, a := range attrs {
		switch attrType(a.Attr.Type) {
		case unix.NHA_ID:
			id = word(a.Value)
		case unix.NHA_OIF:
			n.link = int(word(a.Value))
		case unix.NHA_GATEWAY:
			n.gateway = addr(a.Value)
		case unix.NHA_GROUP:
			for b := a.Value; len(b) >= sizeofGroupEntry; b = b[sizeofGroupEntry:] {
				n.group = append(n.group, binary.NativeEndian.Uint32(b))
			}
		}
	}
	return id, n
}

// nexthops asks for all objects.
func (c *conn) nexthops() (map[uint32]nexthop, error) {
	var objects map[uint32]nexthop
	err := c.dump(unix.RTM_GETNEXTHOP, unix.RTM_NEWNEXTHOP,
		[]nl.NetlinkRequestData{make(raw, sizeofNhmsg)},
		func() { objects = map[uint32]nexthop{} },
		func(m []byte) {
			id, n := decodeNexthop(m)
			objects[id] = n
		})
	return objects, listed("nexthops", err)
}

// raw is the fixed part of a request that the library has no type for.
type raw []byte

func (r raw) Len() int          { return len(r) }
func (r raw) Serialize() []byte { return r }
