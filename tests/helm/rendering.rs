//! The chart renders what `deploy/` has.

use std::process::Command;

use serde_json::Value;
use testbed::cluster::Cache;
use testbed::cluster::prepare::{self, Part};

use crate::{Objects, chart, helm_command, key, objects, repository, run, template};

/// What `kubectl apply -k` applies, with another namespace as `deploy/README.md` describes.
fn kustomize(folder: &str, namespace: &str) -> Objects {
    let cache = Cache::open().unwrap();
    prepare::ensure(&cache, &[Part::Kubernetes]).unwrap();
    let mut kubectl = Command::new(cache.kubernetes("kubectl"));
    let text = run(kubectl.arg("kustomize").arg(repository(folder))).unwrap();
    objects(&text.replace("kruise-system", namespace))
}

/// Without the annotation that keeps an object, which only the chart has.
fn without_resource_policy(mut object: Value) -> Value {
    let metadata = object["metadata"].as_object_mut().unwrap();
    if let Some(annotations) = metadata.get_mut("annotations").and_then(Value::as_object_mut) {
        annotations.remove("helm.sh/resource-policy");
        if annotations.is_empty() {
            metadata.remove("annotations");
        }
    }
    object
}

fn assert_same_objects(rendered: Objects, folder: &str, namespace: &str) {
    let mut expected = kustomize(folder, namespace);
    assert!(expected.len() > 70, "{folder}");
    for (key, object) in rendered {
        let expected = expected.remove(&key).unwrap_or_default();
        assert_eq!(without_resource_policy(object), expected, "{folder}: {key}");
    }
    assert_eq!(expected.keys().next(), None, "{folder}: the chart lacks objects");
}

#[test]
fn default_values_render_the_kustomize_base() {
    assert_same_objects(template(&[]).unwrap(), "deploy/default", "kruise-system");
}

#[test]
fn socket_locations_render_the_overlays_for_runtimes() {
    for (overlay, location) in [
        ("crio", "/run/crio"),
        ("k3s", "/run/k3s/containerd"),
        ("any", "/run"),
    ] {
        let rendered = template(&["--set", &format!("daemon.socketLocation={location}")]).unwrap();
        assert_same_objects(rendered, &format!("deploy/runtimes/{overlay}"), "kruise-system");
    }
}

/// In bindings, webhooks, CRDs and conditions of policies, too.
#[test]
fn other_namespace_is_replaced_everywhere() {
    let rendered = template(&["--set", "installation.namespace=elsewhere"]).unwrap();
    assert_same_objects(rendered, "deploy/default", "elsewhere");
}

/// Helm deletes no CRD and no Namespace, and with them no object of a user.
#[test]
fn crds_and_namespaces_are_kept() {
    for (key, object) in template(&[]).unwrap() {
        let is_kept = object["metadata"]["annotations"]["helm.sh/resource-policy"] == "keep";
        let contains_objects = ["CustomResourceDefinition", "Namespace"].map(|kind| object["kind"] == kind);
        assert_eq!(is_kept, contains_objects.contains(&true), "{key}");
    }
    let left_out = template(&["--set", "crds.managed=false,installation.createNamespace=false"]).unwrap();
    let mut expected = template(&[]).unwrap();
    expected.retain(|key, object| {
        object["kind"] != "CustomResourceDefinition" && key != "Namespace//kruise-system"
    });
    assert_eq!(left_out, expected);
}

/// Who creates the namespace gets the labels from the README.
#[test]
fn readme_has_the_labels_of_the_namespace() {
    let readme = std::fs::read_to_string(repository("deploy/helm/kruise/README.md")).unwrap();
    let namespace = template(&[]).unwrap().remove("Namespace//kruise-system").unwrap();
    let labels = namespace["metadata"]["labels"].as_object().unwrap();
    assert!(labels.len() > 2);
    for (name, value) in labels
        .iter()
        .filter(|(name, _)| *name != "app.kubernetes.io/part-of")
    {
        let label = format!(" {name}={}", value.as_str().unwrap());
        assert!(readme.contains(&label), "README.md has no {label}");
    }
}

#[test]
fn chart_passes_lint_and_has_the_version_of_the_programs() {
    let home = tempfile::tempdir().unwrap();
    run(helm_command(home.path()).args(["lint", "--strict", &chart()])).unwrap();
    let manifest = std::fs::read_to_string(repository("deploy/helm/kruise/Chart.yaml")).unwrap();
    let manifest: Value = serde_yaml::from_str(&manifest).unwrap();
    let version = env!("CARGO_PKG_VERSION");
    assert_eq!(manifest["version"], version);
    assert_eq!(manifest["appVersion"], format!("v{version}"));
    let images = template(&[]).unwrap().into_values().flat_map(|object| {
        let containers = &object["spec"]["template"]["spec"]["containers"];
        let image = containers[0]["image"].as_str().map(str::to_owned);
        image.map(|image| (key(&object), image))
    });
    let images: Vec<_> = images.collect();
    assert_eq!(images.len(), 3);
    for (key, image) in images {
        assert!(image.ends_with(&format!(":v{version}")), "{key}: {image}");
    }
}
