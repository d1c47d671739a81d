// SPDX-License-Identifier: Apache-2.0

package route

import (
	"context"
	"time"
)

// settle returns when wake has been quiet for quietTime, after maxDelay at the
// latest.
func settle(ctx context.Context, wake <-chan struct{}) {
	latest := time.After(maxDelay)
	for {
		select {
		case <-ctx.Done():
			return
		case <-latest:
			return
		case <-time.After(quietTime):
			return
		case <-wake:
		}
	}
}

func pause(ctx context.Context, d time.Duration) {
	select {
	case <-ctx.Done():
	case <-time.After(d):
	}
}
