// Kdm is the part of a kubelet that a device plugin meets: the real device manager and the real topology manager, in
// a directory of the caller's choosing.
//
// It reads one command per line from standard input and answers each with one line on standard output, both JSON;
// device_manager.py says what they are. It does one thing at a time, as the kubelet's own loop does: a plugin that
// hangs in Allocate hangs it. It ends when its input does, leaving its sockets behind, as a kubelet does.
package main

import (
	"bufio"
	"encoding/json"
	"flag"
	"fmt"
	"os"

	"k8s.io/klog/v2"
)

func main() {
	klog.InitFlags(nil)
	var o options
	flag.StringVar(&o.dir, "dir", "", "where kubelet.sock and the checkpoint are")
	flag.StringVar(&o.pods, "pods", "", "the file that remembers the admitted pods across restarts and crashes")
	flag.StringVar(&o.policy, "topology-policy", "none", "none, best-effort, restricted or single-numa-node")
	flag.IntVar(&o.numa, "numa", 1, "how many NUMA nodes the machine has")
	flag.Parse()
	if o.dir == "" || o.pods == "" || flag.NArg() > 0 {
		fmt.Fprintln(os.Stderr, "kdm: --dir and --pods are needed, and nothing but flags")
		os.Exit(2)
	}
	wire := &tripwire{Writer: os.Stderr}
	// By way of a writer of ours, and once each: by itself klog writes an error as a warning and as news, too.
	for name, value := range map[string]string{"logtostderr": "false", "stderrthreshold": "FATAL", "one_output": "true"} {
		if err := flag.Set(name, value); err != nil {
			panic(err)
		}
	}
	klog.SetOutput(wire)
	if err := serve(&kubelet{options: o, log: wire}); err != nil {
		fmt.Fprintln(os.Stderr, "kdm:", err)
		os.Exit(1)
	}
}

func serve(k *kubelet) error {
	rejected, err := k.start()
	if err != nil {
		return err
	}
	answers := json.NewEncoder(os.Stdout)
	if err := answers.Encode(answer{"rejected": rejected}); err != nil {
		return err
	}
	commands := bufio.NewScanner(os.Stdin)
	for commands.Scan() {
		var c command
		if err := json.Unmarshal(commands.Bytes(), &c); err != nil {
			return fmt.Errorf("command %q: %w", commands.Bytes(), err)
		}
		a := k.do(c)
		a["id"] = c.ID
		if err := answers.Encode(a); err != nil {
			return err
		}
	}
	return commands.Err()
}
