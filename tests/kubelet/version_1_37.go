//go:build !kubelet_1_36

package main

import (
	"context"

	cadvisor "github.com/google/cadvisor/lib/model"
	v1 "k8s.io/api/core/v1"
	"k8s.io/klog/v2"
	"k8s.io/kubernetes/pkg/kubelet/cm/topologymanager"
	"k8s.io/kubernetes/pkg/kubelet/lifecycle"
)

type numaNode = cadvisor.Node

func newTopologyManager(nodes []numaNode, policy string) (topologymanager.Manager, error) {
	return topologymanager.NewManager(klog.Background(), nodes, policy, topologymanager.ContainerTopologyScope, nil)
}

func (k *kubelet) admission(pod *v1.Pod) lifecycle.PodAdmitResult {
	attributes := lifecycle.PodAdmitAttributes{Pod: pod, Operation: lifecycle.AddOperation}
	return k.topology.Admit(context.Background(), &attributes)
}

func (k *kubelet) capacity() (v1.ResourceList, v1.ResourceList, []string) {
	return k.devices.GetCapacity(klog.Background())
}

func (k *kubelet) collectDevices() {
	k.devices.UpdateAllocatedDevices(klog.Background())
}

func (k *kubelet) topologyHints(pod *v1.Pod, container *v1.Container) map[string][]topologymanager.TopologyHint {
	return k.devices.GetTopologyHints(klog.Background(), pod, container, lifecycle.AddOperation)
}
