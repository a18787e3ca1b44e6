//! The chart renders what `deploy/` has.

use std::process::Command;

use serde_json::Value;
use testbed::cluster::Cache;
use testbed::cluster::prepare::{self, Part};

use crate::releases::copy_folder;
use crate::{
    Objects, REGISTRY, chart, helm_command, image_values, key, objects, repository, run, template,
    template_chart,
};

/// What `kubectl apply -k` applies, with another namespace and images of a user as the READMEs describe.
fn kustomize(folder: &str, namespace: &str) -> Objects {
    let cache = Cache::open().unwrap();
    prepare::ensure(&cache, &[Part::Kubernetes]).unwrap();
    let mut kubectl = Command::new(cache.kubernetes("kubectl"));
    let text = run(kubectl.arg("kustomize").arg(repository(folder))).unwrap();
    let text = text.replace("registry.invalid/kruise-rs", REGISTRY);
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

#[test]
fn resource_quota_can_be_left_out() {
    let left_out = template(&["--set", "installation.createResourceQuota=false"]).unwrap();
    let mut expected = template(&[]).unwrap();
    let quota = expected.remove("ResourceQuota/kruise-system/kruise-critical-pods");
    assert!(quota.is_some());
    assert_eq!(left_out, expected);
}

/// As a release does before it packages the chart.
#[test]
fn chart_of_a_release_names_its_images_by_digest() {
    let folder = tempfile::tempdir().unwrap();
    let copy = folder.path().join("kruise");
    copy_folder(&repository("deploy/helm/kruise"), &copy);
    let digest = |digit: &str| format!("sha256:{}", digit.repeat(64));
    let name_images = |daemon: &str, manager: &str| {
        let mut script = Command::new(repository(".github/scripts/name-images"));
        script
            .arg(copy.join("values.yaml"))
            .args(["ghcr.io/owner", "v1", daemon, manager]);
        run(&mut script)
    };
    let refused = name_images(&digest("a"), "").unwrap_err();
    assert!(refused.contains("not a digest"), "{refused}");
    name_images(&digest("a"), &digest("b")).unwrap();
    // A second run finds no tag to replace.
    name_images(&digest("a"), &digest("c")).unwrap_err();
    let rendered = template_chart(&copy.display().to_string(), &[]).unwrap();
    for (kind, name, program, digit) in [
        ("DaemonSet", "kruise-daemon", "kruise-daemon", "a"),
        ("Deployment", "kruise-manager", "kruise-manager", "b"),
        ("Deployment", "kruise-webhook", "kruise-manager", "b"),
    ] {
        let workload = &rendered[&format!("{kind}/kruise-system/{name}")];
        let image = &workload["spec"]["template"]["spec"]["containers"][0]["image"];
        let expected = format!("ghcr.io/owner/{program}:v1@{}", digest(digit));
        assert_eq!(image.as_str(), Some(expected.as_str()));
    }
    let values = std::fs::read_to_string(copy.join("values.yaml")).unwrap();
    assert!(!values.contains("registry.invalid") && !values.contains("not resolve"));
}

/// Otherwise a change-over replaces the Pods of OpenKruise by ones that never start.
#[test]
fn images_that_do_not_resolve_are_refused() {
    let manager = "manager.image.repository=r.example/manager";
    let daemon = "daemon.image.repository=r.example/daemon";
    for flags in [&[][..], &["--is-upgrade"]] {
        let render = |images: &str| template_chart(&chart(), &[&["--set", images], flags].concat());
        for (images, missing) in [(manager, "daemon"), (daemon, "manager")] {
            let refused = render(images).unwrap_err();
            let expected = format!("image registry.invalid/kruise-rs/kruise-{missing} does not resolve");
            assert!(refused.contains(&expected), "{refused}");
        }
        render(&format!("{manager},{daemon}")).unwrap();
        // There is no DaemonSet.
        render(&format!("{manager},featureGates=KruiseDaemon=false")).unwrap();
    }
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
    let images = image_values(home.path());
    run(helm_command(home.path()).args(["lint", "--strict", &chart(), "--values", &images])).unwrap();
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
