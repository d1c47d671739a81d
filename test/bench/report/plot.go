// SPDX-License-Identifier: Apache-2.0

package report

import (
	"fmt"
	"path/filepath"

	"gonum.org/v1/plot"
	"gonum.org/v1/plot/plotter"
	"gonum.org/v1/plot/plotutil"
	"gonum.org/v1/plot/vg"
)

const (
	width, height = 22 * vg.Centimeter, 11 * vg.Centimeter
	barWidth      = 7   // points
	legendRoom    = 1.3 // of the height of the bars
)

// Plot writes the plots into a directory.
func (r Results) Plot(directory string) error {
	for name, draw := range map[string]func() (*plot.Plot, error){
		"packets": func() (*plot.Plot, error) {
			return r.ratios("Packets/s against plain routing", Established, Exempt, Own)
		},
		"tcp": func() (*plot.Plot, error) {
			return r.ratios("TCP against plain routing", Throughput, Unaided, Connections)
		},
		"flows": r.lines,
		"runs":  r.runs,
	} {
		p, err := draw()
		if err != nil {
			return fmt.Errorf("plot %s: %w", name, err)
		}
		if err := p.Save(width, height, filepath.Join(directory, name+".svg")); err != nil {
			return fmt.Errorf("write plot %s: %w", name, err)
		}
	}
	return nil
}

// ratios has a group of bars for each contender.
func (r Results) ratios(title string, figures ...Figure) (*plot.Plot, error) {
	p := plot.New()
	p.Title.Text, p.Y.Min = title, 0
	p.Legend.Top, p.Legend.Padding = true, vg.Millimeter
	columns := r.columns()
	var names []string
	for _, c := range columns {
		names = append(names, c.short())
	}
	for i, f := range figures {
		values := make(plotter.Values, len(columns))
		for j, c := range columns {
			values[j], _ = r.Ratio(c.key(f, CIDRs), c.limit().key(f, CIDRs))
		}
		bars, err := plotter.NewBarChart(values, barWidth)
		if err != nil {
			return nil, err
		}
		bars.Color, bars.LineStyle.Width = plotutil.Color(i), 0
		bars.Offset = vg.Length(i*barWidth - barWidth*(len(figures)-1)/2)
		p.Add(bars)
		p.Legend.Add(string(f), bars)
	}
	p.NominalX(names...)
	p.Add(horizontal())
	p.Y.Max *= legendRoom
	p.X.Max += 0.5
	return p, nil
}

// short breaks a name where it is long.
func (c column) short() string {
	name := map[string]string{
		Plain: "plain", Legacy: "iptables-\nlegacy", NFT: "iptables-\nnft", Set: "nft set",
		Upstream: "classic\nagent", Iptables: "ours,\niptables", EBPF: "ours,\nebpf", FastPath: "ours,\nfast path",
	}[c.name]
	if c.conntrack && !c.netfilter() {
		name += "\nconntrack"
	}
	return name
}

func horizontal() *plotter.Grid {
	grid := plotter.NewGrid()
	grid.Vertical.Width = 0
	return grid
}

// lines shows how new flows/s depend on the number of CIDRs.
func (r Results) lines() (*plot.Plot, error) {
	p := plot.New()
	p.Title.Text = string(NewFlows)
	p.X.Label.Text = "CIDRs"
	p.X.Scale, p.Y.Scale = plot.LogScale{}, plot.LogScale{}
	p.X.Tick.Marker, p.Y.Tick.Marker = plot.LogTicks{Prec: -1}, plot.LogTicks{Prec: -1}
	p.Legend.Left = true
	for i, c := range r.columns() {
		if c.name == Plain {
			continue
		}
		var points plotter.XYs
		for _, size := range r.at(NewFlows) {
			if rate, ok := r.Median(c.key(NewFlows, size)); ok {
				points = append(points, plotter.XY{X: float64(size), Y: rate})
			}
		}
		line, dots, err := plotter.NewLinePoints(points)
		if err != nil {
			return nil, err
		}
		line.Color, line.Dashes = plotutil.Color(i), plotutil.Dashes(i)
		dots.Color, dots.Shape = plotutil.Color(i), plotutil.Shape(i)
		p.Add(line, dots)
		p.Legend.Add(c.String(), line, dots)
	}
	p.Add(horizontal())
	return p, nil
}

// runs has a bar for each way through the programs.
func (r Results) runs() (*plot.Plot, error) {
	p := plot.New()
	p.Title.Text, p.X.Min = string(Run), 0
	ways := r.subjects(Run)
	values := make(plotter.Values, len(ways))
	for i, way := range ways {
		values[i], _ = r.Median(Key{Run, way, false, 0})
	}
	bars, err := plotter.NewBarChart(values, 3*barWidth)
	if err != nil {
		return nil, err
	}
	bars.Horizontal, bars.Color, bars.LineStyle.Width = true, plotutil.Color(0), 0
	p.Add(bars)
	p.NominalY(ways...)
	return p, nil
}
