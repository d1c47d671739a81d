// SPDX-License-Identifier: Apache-2.0

package config

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"
)

const (
	// soon is patient with a busy machine; TestWatchIsQuick is about time.
	soon = 5 * time.Second
	// long is enough to see that nothing is noticed.
	long = 2*longestWait + quietTime
)

// watch runs a watcher on path for the time of the test. The channel delivers
// one value for each call of changed.
func watch(t *testing.T, path string) <-chan struct{} {
	t.Helper()
	ctx, cancel := context.WithCancel(t.Context())
	calls := make(chan struct{}, 100)
	done := make(chan error)
	w := NewWatcher(path, slog.New(slog.DiscardHandler))
	go func() { done <- w.Run(ctx, func() { calls <- struct{}{} }) }()
	t.Cleanup(func() {
		cancel()
		if err := <-done; err != nil {
			t.Errorf("Run = %v", err)
		}
	})
	return calls
}

func wantCall(t *testing.T, calls <-chan struct{}, after string) {
	t.Helper()
	select {
	case <-calls:
	case <-time.After(soon):
		t.Fatalf("not noticed within %v: %s", soon, after)
	}
}

func wantNoCall(t *testing.T, calls <-chan struct{}, after string) {
	t.Helper()
	select {
	case <-calls:
		t.Fatalf("noticed though nothing changed: %s", after)
	case <-time.After(long):
	}
}

func must(t *testing.T, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}

func TestWatchFile(t *testing.T) {
	t.Parallel()
	path := file(t, "resyncInterval: 5s\n")
	calls := watch(t, path)

	write(t, filepath.Join(filepath.Dir(path), "other"), "")
	wantNoCall(t, calls, "another file")
	write(t, path, "resyncInterval: 10s\n")
	wantCall(t, calls, "write")

	write(t, path, "resyncInterval: 10s\n")
	must(t, os.Chmod(path, 0o600))
	must(t, os.Chtimes(path, time.Now(), time.Now()))
	wantNoCall(t, calls, "the same content, attributes")

	write(t, path+".tmp", "resyncInterval: 15s\n")
	must(t, os.Rename(path+".tmp", path))
	wantCall(t, calls, "rename over it")
	write(t, path, "resyncInterval: 20s\n")
	wantCall(t, calls, "write after the rename")

	must(t, os.Remove(path))
	wantCall(t, calls, "removal")
	write(t, path, "")
	wantCall(t, calls, "an empty file where there was none")
}

func TestWatchIsQuick(t *testing.T) {
	path := file(t, "")
	calls := watch(t, path)
	var took []time.Duration
	for i := range 5 {
		start := time.Now()
		write(t, path, fmt.Sprintf("resyncInterval: %ds\n", i+1))
		wantCall(t, calls, "write")
		took = append(took, time.Since(start))
	}
	slices.Sort(took)
	if median := took[2]; median > time.Second/2 {
		t.Errorf("noticed after %v, want half a second", median)
	}
}

// configMap imitates what kubelet makes of a ConfigMap: files are links through
// ..data, a link to a directory that is replaced as a whole.
type configMap struct {
	dir     string
	version int
}

func (m *configMap) update(t *testing.T, files map[string]string) {
	t.Helper()
	m.version++
	version := fmt.Sprintf("..2026_01_01_%d", m.version)
	must(t, os.MkdirAll(filepath.Join(m.dir, version), 0o755))
	for name, content := range files {
		write(t, filepath.Join(m.dir, version, name), content)
	}
	data := filepath.Join(m.dir, "..data")
	old, err := os.Readlink(data)
	if err != nil && !errors.Is(err, os.ErrNotExist) {
		t.Fatal(err)
	}
	must(t, os.Symlink(version, data+"_tmp"))
	must(t, os.Rename(data+"_tmp", data))
	m.link(t, files)
	if old != "" {
		must(t, os.RemoveAll(filepath.Join(m.dir, old)))
	}
}

// link makes the names that users see, and takes those away that are no more.
func (m *configMap) link(t *testing.T, files map[string]string) {
	t.Helper()
	entries, err := os.ReadDir(m.dir)
	must(t, err)
	for _, e := range entries {
		if _, ok := files[e.Name()]; !ok && !strings.HasPrefix(e.Name(), "..") {
			must(t, os.Remove(filepath.Join(m.dir, e.Name())))
		}
	}
	for name := range files {
		err := os.Symlink(filepath.Join("..data", name), filepath.Join(m.dir, name))
		if err != nil && !errors.Is(err, os.ErrExist) {
			t.Fatal(err)
		}
	}
}

func TestWatchConfigMap(t *testing.T) {
	for _, name := range []string{"file", "directory"} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			m := &configMap{dir: t.TempDir()}
			path := filepath.Join(m.dir, "ip-masq-agent")
			if name == "directory" {
				path = m.dir
			}
			m.update(t, map[string]string{"ip-masq-agent": "resyncInterval: 1s\n"})
			calls := watch(t, path)
			for i := range 3 {
				content := fmt.Sprintf("resyncInterval: %ds\n", i+10)
				m.update(t, map[string]string{"ip-masq-agent": content})
				wantCall(t, calls, "swap of ..data")
				result, err := Load(Options{Path: path})
				if err != nil || result.Config.ResyncInterval != time.Duration(i+10)*time.Second {
					t.Fatalf("after the swap: %v, %v", result.Config, err)
				}
			}
			m.update(t, map[string]string{"ip-masq-agent": "resyncInterval: 12s\n"})
			wantNoCall(t, calls, "swap to the same content")
			m.update(t, nil)
			wantCall(t, calls, "the ConfigMap is gone")
			m.update(t, map[string]string{"ip-masq-agent": "resyncInterval: 1s\n"})
			wantCall(t, calls, "the ConfigMap is back")
		})
	}
}

// TestWatchOptionalConfigMap: the volume is there from the start, and empty.
func TestWatchOptionalConfigMap(t *testing.T) {
	t.Parallel()
	m := &configMap{dir: t.TempDir()}
	m.update(t, nil)
	calls := watch(t, filepath.Join(m.dir, "ip-masq-agent"))
	m.update(t, map[string]string{"ip-masq-agent": "resyncInterval: 1s\n"})
	wantCall(t, calls, "first creation")
}

func TestWatchMissingDirectories(t *testing.T) {
	t.Parallel()
	top := t.TempDir()
	path := filepath.Join(top, "a", "b", "ip-masq-agent")
	calls := watch(t, path)
	for _, content := range []string{"resyncInterval: 5s\n", "resyncInterval: 10s\n"} {
		write(t, path, content)
		wantCall(t, calls, "creation with all directories")
		must(t, os.RemoveAll(filepath.Join(top, "a")))
		wantCall(t, calls, "removal of all directories")
	}
	must(t, os.Mkdir(filepath.Join(top, "a"), 0o755))
	wantNoCall(t, calls, "a directory without the file")
	write(t, path, "resyncInterval: 5s\n")
	wantCall(t, calls, "creation in steps")
	must(t, os.Rename(filepath.Join(top, "a", "b"), filepath.Join(top, "a", "c")))
	wantCall(t, calls, "the directory moved away")
	write(t, path, "resyncInterval: 5s\n")
	wantCall(t, calls, "another directory in its place")
}

func TestWatchDirectory(t *testing.T) {
	t.Parallel()
	dir := filepath.Join(t.TempDir(), "config")
	calls := watch(t, dir)
	write(t, filepath.Join(dir, "ip-masq-1"), "resyncInterval: 5s\n")
	wantCall(t, calls, "the directory with its first file")
	write(t, filepath.Join(dir, "ip-masq-2"), "resyncInterval: 5s\n")
	wantCall(t, calls, "another file")
	write(t, filepath.Join(dir, "ip-masq-2"), "resyncInterval: 10s\n")
	wantCall(t, calls, "change of one")
	write(t, filepath.Join(dir, "other"), "resyncInterval: 10s\n")
	wantNoCall(t, calls, "a file of another name")
	must(t, os.Rename(filepath.Join(dir, "ip-masq-2"), filepath.Join(dir, "x")))
	wantCall(t, calls, "one named otherwise")
	must(t, os.Mkdir(filepath.Join(dir, "ip-masq-3"), 0o755))
	wantCall(t, calls, "a directory in the place of a file")
	target := file(t, "resyncInterval: 5s\n")
	must(t, os.Symlink(target, filepath.Join(dir, "ip-masq-4")))
	wantCall(t, calls, "a link to a file elsewhere")
	write(t, target, "resyncInterval: 10s\n")
	wantCall(t, calls, "write to where the link leads")
	must(t, os.RemoveAll(dir))
	wantCall(t, calls, "removal of the directory")
}

func TestWatchThroughLinks(t *testing.T) {
	t.Parallel()
	top := t.TempDir()
	write(t, filepath.Join(top, "v1", "config"), "resyncInterval: 1s\n")
	write(t, filepath.Join(top, "v2", "config"), "resyncInterval: 2s\n")
	must(t, os.Symlink("v1", filepath.Join(top, "current")))
	must(t, os.MkdirAll(filepath.Join(top, "etc"), 0o755))
	path := filepath.Join(top, "etc", "ip-masq-agent")
	must(t, os.Symlink("../current/config", path))
	calls := watch(t, path)

	write(t, filepath.Join(top, "v1", "config"), "resyncInterval: 3s\n")
	wantCall(t, calls, "write to where the link leads")
	must(t, os.Symlink("v2", filepath.Join(top, "new")))
	must(t, os.Rename(filepath.Join(top, "new"), filepath.Join(top, "current")))
	wantCall(t, calls, "a directory on the way is another one")
	write(t, filepath.Join(top, "v2", "config"), "resyncInterval: 4s\n")
	wantCall(t, calls, "write to where the link leads now")
	must(t, os.Remove(path))
	must(t, os.Symlink("ip-masq-agent", path))
	wantCall(t, calls, "the link leads to itself")
}

// TestWatchWaitsForTheEndOfAChange: who truncates first and writes then is not
// taken for someone who emptied the file.
func TestWatchWaitsForTheEndOfAChange(t *testing.T) {
	t.Parallel()
	path := file(t, "resyncInterval: 5s\n")
	calls := watch(t, path)
	for try := 1; ; try++ {
		content := fmt.Sprintf("resyncInterval: %ds\n", try)
		inTime := writeInSteps(t, path, "", "resync", content)
		wantCall(t, calls, "a change in steps")
		if result, err := Load(Options{Path: path}); inTime && (err != nil || result.Config.ResyncInterval != time.Duration(try)*time.Second) {
			t.Errorf("after the call: %v, %v", result.Config, err)
		}
		if inTime {
			wantNoCall(t, calls, "nothing more")
			return
		}
		if try == 20 {
			t.Fatal("the machine is too busy to write quickly")
		}
		for time.Sleep(long); len(calls) > 0; {
			<-calls
		}
	}
}

// writeInSteps reports whether the steps were as close to each other as those
// of one change.
func writeInSteps(t *testing.T, path string, steps ...string) bool {
	t.Helper()
	start := time.Now()
	for _, content := range steps {
		write(t, path, content)
		time.Sleep(quietTime / 10)
	}
	return time.Since(start) < quietTime
}

// TestWatchInABusyDirectory: events that do not end do not keep a change from
// being noticed.
func TestWatchInABusyDirectory(t *testing.T) {
	t.Parallel()
	path := file(t, "resyncInterval: 5s\n")
	calls := watch(t, path)
	stop := make(chan struct{})
	stopped := make(chan error, 1)
	go func() {
		for i := 0; ; i++ {
			select {
			case <-stop:
				stopped <- nil
				return
			case <-time.After(quietTime / 10):
			}
			if err := os.WriteFile(path+".busy", fmt.Appendln(nil, i), 0o644); err != nil {
				stopped <- err
				return
			}
		}
	}()
	time.Sleep(quietTime)
	write(t, path, "resyncInterval: 10s\n")
	wantCall(t, calls, "change among other events")
	close(stop)
	must(t, <-stopped)
}

// TestWatchSeesWhatChangedBeforeRun: nothing is lost between reading the
// configuration after NewWatcher and Run.
func TestWatchSeesWhatChangedBeforeRun(t *testing.T) {
	t.Parallel()
	path := file(t, "resyncInterval: 5s\n")
	w := NewWatcher(path, slog.New(slog.DiscardHandler))
	write(t, path, "resyncInterval: 10s\n")
	ctx, cancel := context.WithTimeout(t.Context(), 10*time.Second)
	defer cancel()
	must(t, w.Run(ctx, cancel))
	if errors.Is(ctx.Err(), context.DeadlineExceeded) {
		t.Error("not noticed: change before Run")
	}
}

// TestWatchWithoutInotify: one line, and nothing happens until the end.
func TestWatchWithoutInotify(t *testing.T) {
	var out bytes.Buffer
	w := &Watcher{path: "/x", log: slog.New(slog.NewTextHandler(&out, nil))}
	w.start(nil, errors.New("too many open files"))
	ctx, cancel := context.WithTimeout(t.Context(), 50*time.Millisecond)
	defer cancel()
	must(t, w.Run(ctx, func() { t.Error("changed was called") }))
	if ctx.Err() == nil {
		t.Error("Run ended before its context")
	}
	if got := out.String(); strings.Count(got, "\n") != 1 || !strings.Contains(got, "too many open files") {
		t.Errorf("logged:\n%s", got)
	}
}
