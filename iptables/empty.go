// SPDX-License-Identifier: Apache-2.0

package iptables

import (
	"encoding/binary"
	"errors"
	"fmt"
	"syscall"

	"github.com/vishvananda/netlink/nl"
	"golang.org/x/sys/unix"
)

// RemoveEmptyTables removes the nftables tables that iptables-nft makes for our
// rules, where nothing is left in them but the empty chain POSTROUTING. One that
// holds anything else stays as it is; the kernel sees to that.
//
// It is not part of Cleanup: such a chain keeps netfilter translating, and the
// connections that it translates outlive their rules.
func RemoveEmptyTables() error {
	for _, f := range []uint8{unix.NFPROTO_IPV4, unix.NFPROTO_IPV6} {
		for _, table := range []string{tableNAT, tableMangle} {
			if err := removeEmptyTable(f, table); err != nil {
				return fmt.Errorf("remove empty nftables table %s: %w", table, err)
			}
		}
	}
	return nil
}

func removeEmptyTable(family uint8, table string) error {
	fd, err := unix.Socket(unix.AF_NETLINK, unix.SOCK_RAW|unix.SOCK_CLOEXEC, unix.NETLINK_NETFILTER)
	if err != nil {
		return fmt.Errorf("open netfilter netlink: %w", err)
	}
	defer func() { _ = unix.Close(fd) }()
	if err := unix.SetsockoptTimeval(fd, unix.SOL_SOCKET, unix.SO_RCVTIMEO, &unix.Timeval{Sec: 5}); err != nil {
		return fmt.Errorf("set netlink timeout: %w", err)
	}
	if err := unix.Sendto(fd, emptyTableBatch(family, table), 0, &unix.SockaddrNetlink{Family: unix.AF_NETLINK}); err != nil {
		return fmt.Errorf("send: %w", err)
	}
	answer := make([]byte, 1<<16)
	n, _, err := unix.Recvfrom(fd, answer, 0)
	if err != nil {
		return fmt.Errorf("receive: %w", err)
	}
	return refusal(answer[:n])
}

// emptyTableBatch is one transaction: the chain, then the table, and both only
// if nothing is in them (NLM_F_NONREC). The first failure or, in the end, the
// success is answered.
func emptyTableBatch(family uint8, table string) []byte {
	const nonrecursive = 0x100 // NLM_F_NONREC
	const subsystem = unix.NFNL_SUBSYS_NFTABLES << 8
	name := func(kind int, text string) []byte { return nl.NewRtAttr(kind, nl.ZeroTerminated(text)).Serialize() }
	var batch []byte
	batch = append(batch, nfnetlink(unix.NFNL_MSG_BATCH_BEGIN, 0, 0, unix.NFNL_SUBSYS_NFTABLES)...)
	batch = append(batch, nfnetlink(subsystem|unix.NFT_MSG_DELCHAIN, nonrecursive, family, 0,
		name(unix.NFTA_CHAIN_TABLE, table), name(unix.NFTA_CHAIN_NAME, postrouting))...)
	batch = append(batch, nfnetlink(subsystem|unix.NFT_MSG_DELTABLE, nonrecursive|unix.NLM_F_ACK, family, 0,
		name(unix.NFTA_TABLE_NAME, table))...)
	return append(batch, nfnetlink(unix.NFNL_MSG_BATCH_END, 0, 0, unix.NFNL_SUBSYS_NFTABLES)...)
}

// nfnetlink is one message: struct nlmsghdr, struct nfgenmsg, attributes.
func nfnetlink(kind, flags uint16, family uint8, resource uint16, attributes ...[]byte) []byte {
	message := make([]byte, unix.SizeofNlMsghdr, 64)
	binary.NativeEndian.PutUint16(message[4:], kind)
	binary.NativeEndian.PutUint16(message[6:], flags|unix.NLM_F_REQUEST)
	message = append(message, family, unix.NFNETLINK_V0)
	message = binary.BigEndian.AppendUint16(message, resource)
	for _, a := range attributes {
		message = append(message, a...)
	}
	binary.NativeEndian.PutUint32(message, uint32(len(message)))
	return message
}

// refusal reads the answer. That a table is not there, is not empty or belongs to
// somebody else is no error.
func refusal(answer []byte) error {
	messages, err := syscall.ParseNetlinkMessage(answer)
	if err != nil || len(messages) == 0 || len(messages[0].Data) < 4 || messages[0].Header.Type != unix.NLMSG_ERROR {
		return errors.Join(errors.New("no answer from nftables"), err)
	}
	errno := unix.Errno(-int32(binary.NativeEndian.Uint32(messages[0].Data)))
	switch errno {
	case 0, unix.ENOENT, unix.EBUSY, unix.EPERM, unix.EOPNOTSUPP, unix.EINVAL:
		return nil
	}
	return errno
}
