//go:build kubelet_1_36

package main

import (
	cadvisor "github.com/google/cadvisor/info/v1"
	v1 "k8s.io/api/core/v1"
	"k8s.io/kubernetes/pkg/kubelet/cm/topologymanager"
	"k8s.io/kubernetes/pkg/kubelet/lifecycle"
)

type numaNode = cadvisor.Node

func newTopologyManager(nodes []numaNode, policy string) (topologymanager.Manager, error) {
	return topologymanager.NewManager(nodes, policy, topologymanager.ContainerTopologyScope, nil)
}

func (k *kubelet) admission(pod *v1.Pod) lifecycle.PodAdmitResult {
	return k.topology.Admit(&lifecycle.PodAdmitAttributes{Pod: pod, Operation: lifecycle.AddOperation})
}

func (k *kubelet) capacity() (v1.ResourceList, v1.ResourceList, []string) {
	return k.devices.GetCapacity()
}

func (k *kubelet) collectDevices() {
	k.devices.UpdateAllocatedDevices()
}

func (k *kubelet) topologyHints(pod *v1.Pod, container *v1.Container) map[string][]topologymanager.TopologyHint {
	return k.devices.GetTopologyHints(pod, container)
}
