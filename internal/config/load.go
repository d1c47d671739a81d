// SPDX-License-Identifier: Apache-2.0

package config

// Load reads the configuration. No file at all is no error: the result is then
// the defaults. The error is Faults where the content is at fault, all of it at
// once; nothing of such a configuration is in the result.
func Load(o Options) (Result, error) {
	var r report
	result, err := load(o, &r)
	if err != nil {
		return Result{}, err
	}
	if len(r.faults) > 0 {
		return Result{}, Faults(sorted(r.faults))
	}
	result.Warnings = sorted(r.mistakes, r.notices)
	return result, nil
}

// Validate reads the configuration as strictly as can be: a key that Load only
// warns of, because it is unknown or stands there twice, is a fault. IPv6
// prefixes are allowed whatever the options say, as it is about the file and
// not about the flags of an agent.
func Validate(o Options) (Config, error) {
	result, err := Check(o)
	return result.Config, err
}

// Check is Validate with what remains to be warned of: a configuration that
// can be meant as it stands, but that does more than its author may think.
func Check(o Options) (Result, error) {
	var r report
	o.EnableIPv6 = true
	result, err := load(o, &r)
	if err != nil {
		return Result{}, err
	}
	if len(r.faults)+len(r.mistakes) > 0 {
		return Result{}, Faults(sorted(r.faults, r.mistakes))
	}
	result.Warnings = sorted(r.notices)
	return result, nil
}

// load is complete only if r holds no faults afterwards.
func load(o Options, r *report) (Result, error) {
	files, err := readFiles(o.Path, r)
	if err != nil {
		return Result{}, err
	}
	return Result{Config: evaluate(files, o, r), Present: len(files) > 0}, nil
}

// evaluate is what is pure of load.
func evaluate(files []source, o Options, r *report) Config {
	all := make([]settings, 0, len(files))
	for _, f := range files {
		in := interpreter{file: f.file, enableIPv6: o.EnableIPv6, report: r}
		all = append(all, in.settings(decode(f, r)))
	}
	return apply(Defaults(o), mergeAll(all, r), r)
}
