// Judges manifests as the API server does that gets them: manifests FILE...
//
// Each is read strictly into the API's own types, gets their defaults, and is validated. Whatever is found wrong, and
// whatever kubectl would warn of, is written to stdout, one a line; the status is 1 then.
package main

import (
	"bufio"
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"os"

	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/serializer"
	"k8s.io/apimachinery/pkg/util/validation/field"
	"k8s.io/apimachinery/pkg/util/yaml"
	"k8s.io/kubernetes/pkg/api/legacyscheme"
	"k8s.io/kubernetes/pkg/api/pod"
	"k8s.io/kubernetes/pkg/apis/apps"
	_ "k8s.io/kubernetes/pkg/apis/apps/install"
	"k8s.io/kubernetes/pkg/apis/apps/validation"
	_ "k8s.io/kubernetes/pkg/apis/core/install"
	"k8s.io/kubernetes/pkg/capabilities"
)

func main() {
	// As in most clusters: API servers are started with --allow-privileged, because network plugins need it.
	capabilities.Initialize(capabilities.Capabilities{AllowPrivileged: true})
	status := 0
	decoder := serializer.NewCodecFactory(legacyscheme.Scheme, serializer.EnableStrict).UniversalDecoder()
	for _, path := range os.Args[1:] {
		objects := 0
		for _, complaint := range judge(path, decoder, &objects) {
			fmt.Printf("%s: %s\n", path, complaint)
			status = 1
		}
		if objects == 0 {
			fmt.Printf("%s: there is nothing in it\n", path)
			status = 1
		}
	}
	os.Exit(status)
}

func judge(path string, decoder runtime.Decoder, objects *int) (complaints []string) {
	content, err := os.ReadFile(path)
	if err != nil {
		return []string{err.Error()}
	}
	documents := yaml.NewYAMLReader(bufio.NewReader(bytes.NewReader(content)))
	for {
		document, err := documents.Read()
		if errors.Is(err, io.EOF) {
			return complaints
		}
		if err != nil {
			return append(complaints, err.Error())
		}
		object, _, err := decoder.Decode(document, nil, nil)
		if err != nil {
			complaints = append(complaints, err.Error())
			continue
		}
		*objects++
		daemonSet, is := object.(*apps.DaemonSet)
		if !is {
			complaints = append(complaints, fmt.Sprintf("a %T, which this program does not know", object))
			continue
		}
		template := &daemonSet.Spec.Template
		options := pod.GetValidationOptionsFromPodTemplate(template, nil)
		for _, err := range validation.ValidateDaemonSet(daemonSet, options) {
			complaints = append(complaints, err.Error())
		}
		complaints = append(complaints, pod.GetWarningsForPodTemplate(context.Background(), field.NewPath("spec", "template"), template, nil)...)
	}
}
