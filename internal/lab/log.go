// SPDX-License-Identifier: Apache-2.0

package lab

import (
	"bytes"
	"sync"
)

// Log is what a program logs, read while it is written. The zero value is an
// empty one.
type Log struct {
	mu     sync.Mutex
	buffer bytes.Buffer
}

// Write adds to the log. It never fails.
func (l *Log) Write(p []byte) (int, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.buffer.Write(p)
}

// String is the whole log, or what came after the last Take.
func (l *Log) String() string {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.buffer.String()
}

// Take gives the log and empties it.
func (l *Log) Take() string {
	l.mu.Lock()
	defer l.mu.Unlock()
	text := l.buffer.String()
	l.buffer.Reset()
	return text
}
