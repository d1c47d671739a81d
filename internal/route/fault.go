// SPDX-License-Identifier: Apache-2.0

package route

import "log/slog"

// faultLog logs a fault once until it changes or is over.
type faultLog struct {
	log  *slog.Logger
	text string
	last string
}

func (l *faultLog) note(err error) {
	now := ""
	if err != nil {
		now = err.Error()
	}
	if now != "" && now != l.last {
		l.log.Warn(l.text+", trying again", "error", err)
	}
	l.last = now
}
