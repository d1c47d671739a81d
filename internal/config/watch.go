// SPDX-License-Identifier: Apache-2.0

package config

import (
	"context"
	"crypto/sha256"
	"fmt"
	"log/slog"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"time"

	"github.com/fsnotify/fsnotify"
)

const (
	// quietTime without a further event is what a change ends with: writers
	// truncate first and write then.
	quietTime = 100 * time.Millisecond

	// longestWait is how long a change may stay unnoticed while events do not end.
	longestWait = 400 * time.Millisecond
)

// Watch calls changed whenever the content of the configuration at path has
// become another one, until ctx ends. It is NewWatcher and Run.
func Watch(ctx context.Context, path string, changed func(), log *slog.Logger) error {
	return NewWatcher(path, log).Run(ctx, changed)
}

// Watcher notices changes of the configuration. It watches directories and not
// files, because a file that is replaced takes its watch with it, and it takes
// any event as a hint to compare the content.
type Watcher struct {
	path    string
	log     *slog.Logger
	inotify *fsnotify.Watcher // nil: not available
	content fingerprint
	failed  map[string]bool // directories that could not be watched
}

// NewWatcher starts to watch. What is read after this and changes then, Run
// tells. Run must be called, as it also ends the watch.
func NewWatcher(path string, log *slog.Logger) *Watcher {
	if abs, err := filepath.Abs(path); err == nil {
		path = abs
	}
	w := &Watcher{path: path, log: log, failed: make(map[string]bool)}
	w.start(fsnotify.NewWatcher())
	return w
}

func (w *Watcher) start(inotify *fsnotify.Watcher, err error) {
	if err != nil {
		w.log.Warn("config is not watched, changes wait for the next resync", "path", w.path, "error", err)
		return
	}
	w.inotify = inotify
	w.follow()
	w.content = fingerprintOf(w.path)
}

// Run calls changed, which should not take long, for each change of the
// content, until ctx ends. It gives nil then.
func (w *Watcher) Run(ctx context.Context, changed func()) error {
	if w.inotify == nil {
		<-ctx.Done()
		return nil
	}
	defer w.inotify.Close() //nolint:errcheck // nothing is left to be done about it
	var quiet <-chan time.Time
	var latest time.Time
	for {
		select {
		case <-ctx.Done():
			return nil
		case <-quiet:
			quiet = nil
			w.follow()
			if content := fingerprintOf(w.path); content != w.content {
				w.content = content
				changed()
			}
			continue
		case <-w.inotify.Events:
		case err := <-w.inotify.Errors: // events may have been lost
			w.log.Debug("config watch", "path", w.path, "error", err)
		}
		if quiet == nil {
			latest = time.Now().Add(longestWait)
		}
		quiet = time.After(min(quietTime, time.Until(latest)))
	}
}

// follow makes the watched directories those that matter now. A directory that
// appears between looking and watching would be missed, so it looks again
// until nothing is new.
func (w *Watcher) follow() {
	for range 10 {
		want := directories(w.path)
		added := false
		for _, dir := range want {
			if !slices.Contains(w.inotify.WatchList(), dir) {
				added = w.add(dir) || added
			}
		}
		for _, dir := range w.inotify.WatchList() {
			if !slices.Contains(want, dir) {
				_ = w.inotify.Remove(dir) // it may be gone by itself
			}
		}
		if !added {
			return
		}
	}
}

func (w *Watcher) add(dir string) bool {
	err := w.inotify.Add(dir)
	if err != nil && !os.IsNotExist(err) && !w.failed[dir] {
		w.failed[dir] = true
		w.log.Warn("config directory is not watched, changes wait for the next resync", "path", dir, "error", err)
	}
	return err == nil
}

// directories are those in which something happens when the content at path
// becomes another one.
func directories(path string) []string {
	dirs := make(map[string]bool)
	if end := resolve(path, dirs); end != "" {
		dirs[end] = true
		entries, _ := os.ReadDir(end) // without them where it cannot be read
		for _, e := range entries {
			if strings.HasPrefix(e.Name(), filePrefix) {
				resolve(filepath.Join(end, e.Name()), dirs)
			}
		}
	}
	return slices.Sorted(maps.Keys(dirs))
}

// resolve follows path as the kernel does and adds each directory with an entry
// that could lead elsewhere tomorrow: those with a link, and the one in which
// the path ends or does not go on. It gives the directory that path leads to,
// and nothing if it leads to a file or nowhere.
func resolve(path string, dirs map[string]bool) string {
	const maxLinks = 40 // as in the kernel (MAXSYMLINKS)
	dir, rest := "/", split(path)
	for links := 0; len(rest) > 0; {
		name := rest[0]
		next := filepath.Join(dir, name)
		info, err := os.Lstat(next)
		switch {
		case err != nil:
			dirs[dir] = true
			return ""
		case info.Mode()&os.ModeSymlink != 0:
			dirs[dir] = true
			target, err := os.Readlink(next)
			if links++; err != nil || links > maxLinks {
				return ""
			}
			if filepath.IsAbs(target) {
				dir = "/"
			}
			rest = append(split(target), rest[1:]...)
		case len(rest) == 1 && name != "..":
			dirs[dir] = true
			if !info.IsDir() {
				return ""
			}
			return next
		default:
			dir, rest = next, rest[1:]
		}
	}
	return dir
}

func split(path string) []string {
	return strings.FieldsFunc(path, func(c rune) bool { return c == '/' })
}

// fingerprint is equal for equal content. The zero value is that of no file.
type fingerprint [sha256.Size]byte

func fingerprintOf(path string) fingerprint {
	var r report
	files, err := readFiles(path, &r)
	if len(files)+len(r.faults) == 0 && err == nil {
		return fingerprint{}
	}
	content := fmt.Appendf(nil, "%v\n%v\n", err, Faults(r.faults))
	for _, f := range files {
		content = fmt.Appendf(content, "%q %d\n", f.file, len(f.data))
		content = append(content, f.data...)
	}
	return sha256.Sum256(content)
}
