package main

import (
	"context"
	"fmt"
	"math"
	"time"

	v1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/component-base/metrics/legacyregistry"
	"k8s.io/klog/v2"
	"k8s.io/kubernetes/pkg/kubelet/metrics"
)

// How often await looks: what it measures is right to within this.
const interval = time.Millisecond

// A command; each uses some of the fields.
type command struct {
	ID  int64  `json:"id"`
	Cmd string `json:"cmd"`
	UID string `json:"uid"`
	// How much of each resource: of the pod's container, of its init container, and in the node's allocatable.
	Requests    map[string]int64 `json:"requests"`
	Init        map[string]int64 `json:"init"`
	Allocatable map[string]int64 `json:"allocatable"`
	// Seconds.
	Timeout float64 `json:"timeout"`
	// Part of a line of the log.
	Text string `json:"text"`
}

type answer map[string]any

func (k *kubelet) do(c command) answer {
	a, err := k.try(c)
	if err != nil {
		return answer{"error": err.Error()}
	}
	return a
}

func (k *kubelet) try(c command) (answer, error) {
	switch c.Cmd {
	case "capacity":
		return k.status(), nil
	case "await":
		return k.await(c.Allocatable, time.Duration(c.Timeout*float64(time.Second))), nil
	case "admit":
		return k.admitNew(newPod(c))
	case "remove":
		return k.remove(c.UID)
	case "devices":
		pod, ok := k.pods[c.UID]
		if !ok {
			return nil, fmt.Errorf("no pod %q", c.UID)
		}
		return answer{"devices": k.devicesOf(pod)}, nil
	case "hints":
		return k.hints(newPod(c)), nil
	case "registrations":
		return registrations()
	case "freeze_at":
		k.log.arm(c.Text)
		return answer{}, nil
	case "restart":
		if err := k.devices.Stop(klog.Background()); err != nil {
			return nil, err
		}
		rejected, err := k.start()
		return answer{"rejected": rejected}, err
	}
	return nil, fmt.Errorf("no command %q", c.Cmd)
}

// Status is what goes into the node's status.
func (k *kubelet) status() answer {
	capacity, allocatable, deleted := k.capacity()
	return answer{"capacity": counts(capacity), "allocatable": counts(allocatable), "deleted": deleted}
}

// Await waits until the node's allocatable is as given; a resource that is not there counts as 0.
func (k *kubelet) await(want map[string]int64, timeout time.Duration) answer {
	begin := time.Now()
	for {
		_, allocatable, _ := k.capacity()
		met := true
		for name, n := range want {
			quantity := allocatable[v1.ResourceName(name)]
			met = met && quantity.Value() == n
		}
		if met || time.Since(begin) >= timeout {
			a := k.status()
			a["met"] = met
			a["elapsed"] = time.Since(begin).Seconds()
			a["since_start"] = time.Since(k.started).Seconds()
			return a
		}
		time.Sleep(interval)
	}
}

// AdmitNew answers with what the runtime would be told for each container, and with the devices behind it.
func (k *kubelet) admitNew(pod *v1.Pod) (answer, error) {
	if err := k.admit(pod); err != nil {
		// As on a kubelet, what a rejected pod was given before is found and freed at the next occasion.
		k.collectDevices()
		return nil, err
	}
	containers := answer{}
	for _, c := range append(pod.Spec.InitContainers, pod.Spec.Containers...) {
		got, err := k.devices.GetDeviceRunContainerOptions(context.Background(), pod, &c)
		if err != nil {
			return nil, err
		}
		options := answer{}
		if got != nil {
			options = answer{
				"envs": got.Envs, "mounts": got.Mounts, "devices": got.Devices,
				"annotations": got.Annotations, "cdi_devices": got.CDIDevices,
			}
		}
		containers[c.Name] = options
	}
	return answer{"containers": containers, "devices": k.devicesOf(pod)}, k.writePods()
}

func (k *kubelet) remove(uid string) (answer, error) {
	if _, ok := k.pods[uid]; !ok {
		return nil, fmt.Errorf("no pod %q", uid)
	}
	delete(k.pods, uid)
	k.collectDevices()
	return answer{}, k.writePods()
}

// DevicesOf maps each of the pod's containers to its resources, and those to device ids.
func (k *kubelet) devicesOf(pod *v1.Pod) answer {
	containers := answer{}
	for _, c := range append(pod.Spec.InitContainers, pod.Spec.Containers...) {
		resources := map[string][]string{}
		for name, devices := range k.devices.GetDevices(string(pod.UID), c.Name) {
			for id := range devices {
				resources[name] = append(resources[name], id)
			}
		}
		containers[c.Name] = resources
	}
	return containers
}

// Hints are what the device manager would tell the topology manager: by resource, the sets of NUMA nodes that do.
func (k *kubelet) hints(pod *v1.Pod) answer {
	resources := answer{}
	for name, hints := range k.topologyHints(pod, &pod.Spec.Containers[0]) {
		list := []answer{}
		for _, h := range hints {
			list = append(list, answer{"nodes": h.NUMANodeAffinity.GetBits(), "preferred": h.Preferred})
		}
		resources[name] = list
	}
	return answer{"hints": resources}
}

// Registrations counts the calls of Register that this process has seen, by resource.
func registrations() (answer, error) {
	families, err := legacyregistry.DefaultGatherer.Gather()
	if err != nil {
		return nil, err
	}
	counts := map[string]int64{}
	for _, family := range families {
		if family.GetName() != metrics.KubeletSubsystem+"_"+metrics.DevicePluginRegistrationCountKey {
			continue
		}
		for _, m := range family.GetMetric() {
			counts[m.GetLabel()[0].GetValue()] = int64(math.Round(m.GetCounter().GetValue()))
		}
	}
	return answer{"registrations": counts}, nil
}

func newPod(c command) *v1.Pod {
	pod := &v1.Pod{ObjectMeta: metav1.ObjectMeta{Name: c.UID, Namespace: "default", UID: types.UID(c.UID)}}
	pod.Spec.Containers = []v1.Container{container("main", c.Requests)}
	if len(c.Init) > 0 {
		pod.Spec.InitContainers = []v1.Container{container("init", c.Init)}
	}
	return pod
}

func container(name string, requests map[string]int64) v1.Container {
	list := v1.ResourceList{}
	for r, n := range requests {
		list[v1.ResourceName(r)] = *resource.NewQuantity(n, resource.DecimalSI)
	}
	return v1.Container{Name: name, Resources: v1.ResourceRequirements{Limits: list, Requests: list}}
}

func counts(list v1.ResourceList) map[string]int64 {
	numbers := map[string]int64{}
	for name, quantity := range list {
		numbers[string(name)] = quantity.Value()
	}
	return numbers
}
