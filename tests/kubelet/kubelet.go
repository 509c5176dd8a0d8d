package main

import (
	"encoding/json"
	"fmt"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"time"
	_ "unsafe" // for linkname

	v1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/util/sets"
	"k8s.io/component-base/metrics/legacyregistry"
	"k8s.io/klog/v2"
	"k8s.io/kubernetes/pkg/kubelet/cm/containermap"
	"k8s.io/kubernetes/pkg/kubelet/cm/devicemanager"
	"k8s.io/kubernetes/pkg/kubelet/cm/topologymanager"
	"k8s.io/kubernetes/pkg/kubelet/metrics"
)

// The exported constructor has the directory compiled in. The other ways around that are a mount namespace, which
// needs root, and doing without the manager, which is what is to be tested.
//
//go:linkname newDeviceManager k8s.io/kubernetes/pkg/kubelet/cm/devicemanager.newManagerImpl
func newDeviceManager(klog.Logger, string, []numaNode, topologymanager.Store) (*devicemanager.ManagerImpl, error)

type options struct {
	dir    string
	pods   string
	policy string
	numa   int
}

// A kubelet, as far as devices go.
type kubelet struct {
	options
	log      *tripwire
	devices  *devicemanager.ManagerImpl
	topology topologymanager.Manager
	started  time.Time
	// The admitted pods, by UID.
	pods map[string]*v1.Pod
	// Whether every pod that ran before this kubelet started has been admitted again.
	ready bool
}

func init() {
	legacyregistry.MustRegister(metrics.DevicePluginRegistrationCount)
}

// AddSource is there for config.SourcesReady.
func (k *kubelet) AddSource(string) {}

// AllReady is what lets a kubelet recognise the pods that ran before it started.
func (k *kubelet) AllReady() bool { return k.ready }

// Start does what a kubelet does from its start until it has seen all its pods, in the same order. It returns the
// pods that ran and were not admitted again, with the reason.
func (k *kubelet) start() (map[string]string, error) {
	pods, err := readPods(k.options.pods)
	if err != nil {
		return nil, err
	}
	nodes := make([]numaNode, k.numa)
	for i := range nodes {
		nodes[i].Id = i
	}
	logger := klog.Background()
	k.topology, err = newTopologyManager(nodes, k.policy)
	if err != nil {
		return nil, err
	}
	socket := filepath.Join(k.dir, "kubelet.sock")
	k.devices, err = newDeviceManager(logger, socket, nodes, k.topology)
	if err != nil {
		return nil, err
	}
	k.topology.AddHintProvider(logger, k.devices)

	k.pods, k.ready = map[string]*v1.Pod{}, false
	containers, running := containermap.NewContainerMap(), sets.New[string]()
	for uid, pod := range pods {
		for _, c := range pod.Spec.Containers {
			id := uid + "/" + c.Name
			containers.Add(uid, c.Name, id)
			running.Insert(id)
		}
	}
	err = k.devices.Start(logger, k.activePods, k, containers, running)
	if err != nil {
		return nil, err
	}
	k.started = time.Now()

	rejected := map[string]string{}
	for _, uid := range slices.Sorted(maps.Keys(pods)) {
		if err := k.admit(pods[uid]); err != nil {
			rejected[uid] = err.Error()
		}
	}
	k.ready = true
	return rejected, k.writePods()
}

func (k *kubelet) activePods() []*v1.Pod {
	return slices.Collect(maps.Values(k.pods))
}

// Admit asks the topology manager, which asks the device manager for hints and then to allocate. To both, the pod is
// one of the active ones already, or what its first container got would be freed before its second is looked at.
func (k *kubelet) admit(pod *v1.Pod) error {
	uid := string(pod.UID)
	if _, ok := k.pods[uid]; ok {
		return fmt.Errorf("there is a pod %q already", uid)
	}
	k.pods[uid] = pod
	if result := k.admission(pod); !result.Admit {
		delete(k.pods, uid)
		return fmt.Errorf("%s: %s", result.Reason, result.Message)
	}
	return nil
}

func readPods(path string) (map[string]*v1.Pod, error) {
	pods := map[string]*v1.Pod{}
	text, err := os.ReadFile(path)
	if os.IsNotExist(err) {
		return pods, nil
	}
	if err == nil {
		err = json.Unmarshal(text, &pods)
	}
	return pods, err
}

func (k *kubelet) writePods() error {
	text, err := json.Marshal(k.pods)
	if err != nil {
		return err
	}
	return os.WriteFile(k.options.pods, text, 0o600)
}
