// SPDX-License-Identifier: Apache-2.0

package lab

import (
	"os"
	"strconv"
	"time"
)

// Patience is how long to wait for what usually comes within a time: as many
// times longer as the environment variable LAB_PATIENCE says, for machines that
// are emulated.
func Patience(usual time.Duration) time.Duration {
	factor, err := strconv.Atoi(os.Getenv("LAB_PATIENCE"))
	if err != nil || factor < 1 {
		return usual
	}
	return usual * time.Duration(factor)
}
