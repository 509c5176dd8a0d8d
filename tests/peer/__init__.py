"""A kubelet for tests: grpcio and protobuf in a process of their own, sharing only the contract with nvplug.

Import from :mod:`peer.kubelet` (the kubelet, from Trio) and :mod:`peer.program` (nvplug, from Trio). The
other modules run in the kubelet's process.
"""
