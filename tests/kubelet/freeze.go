package main

import (
	"bytes"
	"io"
	"runtime"
	"sync"
	"syscall"
)

// A tripwire stops this process, as SIGSTOP does, at the moment that it logs a given text: the only way to stop a
// kubelet inside a call and not somewhere near it.
type tripwire struct {
	io.Writer
	mutex sync.Mutex
	text  string
}

// Arm sets the text; the empty text never trips. It trips once.
func (t *tripwire) arm(text string) {
	t.mutex.Lock()
	defer t.mutex.Unlock()
	t.text = text
}

func (t *tripwire) Write(line []byte) (int, error) {
	n, err := t.Writer.Write(line)
	t.mutex.Lock()
	tripped := t.text != "" && bytes.Contains(line, []byte(t.text))
	if tripped {
		t.text = ""
	}
	t.mutex.Unlock()
	if tripped {
		// Sent to this very thread it takes effect before the call returns, so that the line's writer goes no further.
		runtime.LockOSThread()
		defer runtime.UnlockOSThread()
		if err := syscall.Tgkill(syscall.Getpid(), syscall.Gettid(), syscall.SIGSTOP); err != nil {
			return n, err
		}
	}
	return n, err
}
