// SPDX-License-Identifier: Apache-2.0

package lab

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"os/exec"
	"strings"
	"sync"
	"syscall"
	"time"
)

// Cmd is an exec.Cmd that runs inside a namespace and is killed by the kernel
// when the test process ends. Its Start, Wait, Run, Output and CombinedOutput
// take the place of those of exec.Cmd.
type Cmd struct {
	*exec.Cmd

	ns      *Namespace
	waited  chan struct{}
	release func()
}

// Command is like exec.CommandContext, inside the namespace.
func (ns *Namespace) Command(ctx context.Context, name string, args ...string) *Cmd {
	cmd := exec.CommandContext(ctx, name, args...)
	cmd.SysProcAttr = &syscall.SysProcAttr{Pdeathsig: syscall.SIGKILL}
	cmd.WaitDelay = time.Second
	c := &Cmd{Cmd: cmd, ns: ns, waited: make(chan struct{})}
	c.release = sync.OnceFunc(func() { close(c.waited) })
	return c
}

// Start starts the command from a thread that lives until Wait returns: the
// kernel sends the parent death signal when that thread ends, not the process.
func (c *Cmd) Start() error {
	started := make(chan error, 1)
	go func() {
		err := c.ns.Do(func() error {
			if err := c.Cmd.Start(); err != nil {
				return err
			}
			started <- nil
			<-c.waited
			return nil
		})
		if err != nil {
			started <- fmt.Errorf("start %s: %w", c.Args[0], err)
		}
	}()
	return <-started
}

// Wait is like exec.Cmd.Wait.
func (c *Cmd) Wait() error {
	defer c.release()
	return c.Cmd.Wait()
}

// Run is like exec.Cmd.Run.
func (c *Cmd) Run() error {
	if err := c.Start(); err != nil {
		return err
	}
	return c.Wait()
}

// Output gives the standard output. Unless Stderr is set, the error holds what
// the command wrote there.
func (c *Cmd) Output() ([]byte, error) {
	var out, errText bytes.Buffer
	c.Stdout = &out
	if c.Stderr == nil {
		c.Stderr = &errText
	}
	err := c.Run()
	return out.Bytes(), c.describe(err, &errText)
}

// CombinedOutput gives the standard output and standard error together.
func (c *Cmd) CombinedOutput() ([]byte, error) {
	var out bytes.Buffer
	c.Stdout, c.Stderr = &out, &out
	err := c.Run()
	return out.Bytes(), c.describe(err, &out)
}

func (c *Cmd) describe(err error, said *bytes.Buffer) error {
	if _, ok := errors.AsType[*exec.ExitError](err); !ok {
		return err
	}
	return fmt.Errorf("%s: %w: %s", strings.Join(c.Args, " "), err, bytes.TrimSpace(said.Bytes()))
}
