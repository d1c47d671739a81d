// SPDX-License-Identifier: Apache-2.0

package main

import (
	"math"
	"path"
	"slices"

	"github.com/spf13/pflag"

	"ip-masq-agent/internal/agent"
	"ip-masq-agent/internal/config"
	"ip-masq-agent/internal/httpserver"
	"ip-masq-agent/internal/portrange"
	"ip-masq-agent/iptables"
)

const (
	defaultConfig  = "/etc/config/ip-masq-agent"
	defaultChain   = "IP-MASQ-AGENT"
	defaultPinPath = "/sys/fs/bpf/ip-masq-agent"
)

// options are the agent's flags.
type options struct {
	datapath      string
	datapathGiven bool // by the user
	config        config.Options
	chain         string
	randomFully   bool
	invalid       string // "drop", "pass" or, for the datapath's default, ""
	interfaces    []string
	natTableSize  int
	fastPath      bool
	pinPath       string
	metrics       string
	logFormat     string
	verbosity     int
	once, dryRun  bool
	toPortsText   string
	nodePortsText string

	// Set by check.
	toPorts, nodePorts []portrange.Range
	dropInvalid        bool
}

// addFlags declares the agent's flags, with their defaults.
func (o *options) addFlags(flags *pflag.FlagSet) {
	flags.SortFlags = false
	o.addConfigFlags(flags)
	flags.StringVar(&o.chain, "masq-chain", defaultChain, "`name` of the chain in the nat table")
	flags.BoolVar(&o.randomFully, "random-fully", true, "random source ports; false keeps the source port where it is free")
	flags.StringVar(&o.toPortsText, "to-ports", "", "source `ports` for TCP, UDP and SCTP, as in 1024-29999,32768-65535 (default: the kernel's choice)")
	flags.StringVar(&o.nodePortsText, "node-port-range", "30000-32767", "ebpf: `ports` that no translation gets unless --to-ports has them")
	flags.StringVar(&o.invalid, "invalid", "", "`drop|pass` what belongs to no flow, cannot open one and would leave with a pod's source (default: drop for ebpf, pass for iptables)")
	flags.IntVar(&o.natTableSize, "nat-table-size", 262144, "ebpf: `number` of translations that fit, per family")
	flags.BoolVar(&o.fastPath, "fast-path", false, "ebpf: packets of open flows pass by netfilter and routing (Linux 6.6)")
	flags.StringVar(&o.pinPath, "pin-path", defaultPinPath, "ebpf: `directory` on a BPF file system for maps and links")
	flags.StringVar(&o.metrics, "metrics-bind-address", "127.0.0.1:9613", "`address` of /metrics, /healthz and /readyz; 0 turns them off")
	flags.StringVar(&o.logFormat, "log-format", "text", "log format: `text|json`")
	flags.IntVarP(&o.verbosity, "v", "v", 0, "log `verbosity`: 2 adds the rules or map changes, 4 everything")
	flags.BoolVar(&o.once, "once", false, "sync once, then exit")
	flags.BoolVar(&o.dryRun, "dry-run", false, "print what would be programmed, touch nothing")
	addKlogFlags(flags)
	addAzureFlags(flags)
}

// addConfigFlags declares what decides about packets. Commands that answer in
// the absence of an agent have these, too.
func (o *options) addConfigFlags(flags *pflag.FlagSet) {
	flags.StringVar(&o.datapath, "datapath", agent.IPTables, "who translates: `iptables|ebpf`")
	flags.StringVar(&o.config.Path, "config", defaultConfig, "config `path`: a file, or a directory whose files named ip-masq* are merged")
	flags.BoolVar(&o.config.AllReservedRanges, "nomasq-all-reserved-ranges", false, "without nonMasqueradeCIDRs in the config, all reserved ranges keep their source, not only the private ones")
	flags.BoolVar(&o.config.EnableIPv6, "enable-ipv6", false, "IPv6 too")
	flags.StringSliceVar(&o.interfaces, "interfaces", nil, "ebpf: the uplinks, `names` or globs, comma-separated (default: found by their routes)")
}

// check reads what flags hold as text and refuses what makes no sense.
func (o *options) check() error {
	if err := o.checkConfigFlags(); err != nil {
		return err
	}
	if err := iptables.ValidateChain(o.chain); err != nil {
		return usagef("--masq-chain: %w", err)
	}
	var err error
	if o.toPorts, err = portrange.Parse(o.toPortsText); err != nil {
		return usagef("--to-ports: %w", err)
	}
	if o.nodePorts, err = portrange.Parse(o.nodePortsText); err != nil {
		return usagef("--node-port-range: %w", err)
	}
	if err := httpserver.ValidateAddress(o.metrics); err != nil {
		return usagef("--metrics-bind-address: %w", err)
	}
	if o.natTableSize < 1 || o.natTableSize > math.MaxInt32 {
		return usagef("--nat-table-size: %d is not a number from 1 to %d", o.natTableSize, math.MaxInt32)
	}
	if o.fastPath && o.datapath != agent.EBPF {
		return usagef("--fast-path: only --datapath=ebpf has one, this is %s", o.datapath)
	}
	if !slices.Contains([]string{"text", "json"}, o.logFormat) {
		return usagef("--log-format: %q is neither text nor json", o.logFormat)
	}
	return o.checkInvalid()
}

// whyDatapath is for the line at the start.
func (o *options) whyDatapath() string {
	if o.datapathGiven {
		return "--datapath"
	}
	return "default"
}

func (o *options) checkConfigFlags() error {
	if !slices.Contains([]string{agent.IPTables, agent.EBPF}, o.datapath) {
		return usagef("--datapath: %q is neither iptables nor ebpf", o.datapath)
	}
	for _, pattern := range o.interfaces {
		if _, err := path.Match(pattern, ""); err != nil || pattern == "" {
			return usagef("--interfaces: %q is neither a name nor a glob", pattern)
		}
	}
	return nil
}

func (o *options) checkInvalid() error {
	switch o.invalid {
	case "":
		o.dropInvalid = o.datapath == agent.EBPF
	case "drop":
		o.dropInvalid = true
	case "pass":
		o.dropInvalid = false
	default:
		return usagef("--invalid: %q is neither drop nor pass", o.invalid)
	}
	return nil
}

// checkOutput refuses an unknown value of -o.
func checkOutput(format string) error {
	if !slices.Contains([]string{"text", "json"}, format) {
		return usagef("--output: %q is neither text nor json", format)
	}
	return nil
}
