// Injects CDI devices into an empty OCI runtime specification, as a container runtime does, and prints what came of it
// as JSON.
//
// Usage: inject DIRECTORY ANNOTATIONS [NAME...], with the directory of the documents, the container's annotations as a
// JSON object, and fully qualified names of devices.
package main

import (
	"encoding/json"
	"fmt"
	"os"

	oci "github.com/opencontainers/runtime-spec/specs-go"
	"tags.cncf.io/container-device-interface/pkg/cdi"
	specs "tags.cncf.io/container-device-interface/specs-go"
)

// outcome is what is printed.
type outcome struct {
	// Errors of documents, by file.
	Errors map[string][]string `json:"errors"`
	// Devices are all names that can be resolved.
	Devices []string `json:"devices"`
	// Versions that documents say, and that they need, by file.
	Versions map[string][2]string `json:"versions"`
	// Annotated are the names in the annotations.
	Annotated []string `json:"annotated"`
	// Spec is the specification afterwards; nil if injection failed.
	Spec *oci.Spec `json:"spec"`
	// Failure says why it did.
	Failure string `json:"failure"`
}

func main() {
	if err := run(os.Args[1], os.Args[2], os.Args[3:]); err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
}

func run(directory, annotations string, names []string) error {
	cache, err := cdi.NewCache(cdi.WithSpecDirs(directory), cdi.WithAutoRefresh(false))
	if err != nil {
		return err
	}
	found := outcome{Errors: map[string][]string{}, Devices: cache.ListDevices(), Versions: map[string][2]string{}}
	for file, errors := range cache.GetErrors() {
		for _, err := range errors {
			found.Errors[file] = append(found.Errors[file], err.Error())
		}
	}
	for _, vendor := range cache.ListVendors() {
		for _, spec := range cache.GetVendorSpecs(vendor) {
			needed, err := specs.MinimumRequiredVersion(spec.Spec)
			if err != nil {
				return err
			}
			found.Versions[spec.GetPath()] = [2]string{spec.Version, needed}
		}
	}
	given := map[string]string{}
	if err := json.Unmarshal([]byte(annotations), &given); err != nil {
		return err
	}
	if _, found.Annotated, err = cdi.ParseAnnotations(given); err != nil {
		return err
	}
	spec := &oci.Spec{Process: &oci.Process{}, Linux: &oci.Linux{}}
	if _, err := cache.InjectDevices(spec, append(found.Annotated, names...)...); err != nil {
		found.Failure = err.Error()
	} else {
		found.Spec = spec
	}
	return json.NewEncoder(os.Stdout).Encode(found)
}
