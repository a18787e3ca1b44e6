//! Releases of the chart on a real API server.

use std::fs;
use std::path::Path;

use serde_json::{Value, json};
use testbed::cluster::ControlPlane;

use crate::{CLIENT_SIDE, SERVER_SIDE, chart, helm, image_values, repository, template};

/// A user's object, in the stored version.
pub const CLONE_SET: &str = r#"{"apiVersion":"apps.kruise.io/v1beta1","kind":"CloneSet",
    "metadata":{"name":"web","namespace":"default"},"spec":{"replicas":0,"selector":{"matchLabels":{"app":"web"}},
    "template":{"metadata":{"labels":{"app":"web"}},"spec":{"containers":[{"name":"app","image":"i"}]}}}}"#;

pub fn get(plane: &ControlPlane, kind: &str, name: &str, namespace: &str) -> Value {
    let args = ["get", kind, name, "--namespace", namespace, "--output=json"];
    serde_json::from_str(&plane.kubectl(&args).unwrap()).unwrap()
}

pub fn uid(plane: &ControlPlane, kind: &str, name: &str) -> Value {
    get(plane, kind, name, "default")["metadata"]["uid"].clone()
}

/// Waits for the API server to serve the kind, then creates a user's object.
pub fn create(plane: &ControlPlane, crd: &str, object: &str) {
    let established = ["wait", "--for=condition=Established", "--timeout=30s", crd];
    plane.kubectl(&established).unwrap();
    plane.apply(object).unwrap();
}

/// Kinds and names of all objects of an installation.
fn installed(plane: &ControlPlane) -> Vec<String> {
    let kinds = "crds,namespaces,serviceaccounts,clusterroles,clusterrolebindings,roles,rolebindings,services,\
                 deployments,daemonsets,resourcequotas,networkpolicies,poddisruptionbudgets,validatingadmissionpolicies,\
                 validatingadmissionpolicybindings,mutatingwebhookconfigurations,validatingwebhookconfigurations";
    let label = "--selector=app.kubernetes.io/part-of=kruise-rs";
    let args = ["get", kinds, "--all-namespaces", label, "--output=name"];
    let names = plane.kubectl(&args).unwrap();
    names.lines().map(str::to_owned).collect()
}

/// A merge patch by a client with its own name, as the manager does.
pub fn patch_as_manager(plane: &ControlPlane, kind: &str, name: &str, path: &str, value: &Value) {
    let patch = json!([{ "op": "add", "path": path, "value": value }]).to_string();
    let args = [
        "patch",
        kind,
        name,
        "--type=json",
        "--field-manager=kruise-manager",
        "--patch",
        &patch,
    ];
    plane.kubectl(&args).unwrap();
}

/// Adds a webhook for the Pods of a SidecarSet, as the manager does.
pub fn add_pod_webhook(plane: &ControlPlane) {
    let webhook = json!({ "name": "log.mpod.kb.io", "admissionReviewVersions": ["v1"], "sideEffects": "None",
        "clientConfig": { "url": "https://127.0.0.1/mutate-pod" } });
    let (kind, name) = (
        "mutatingwebhookconfiguration",
        "kruise-mutating-webhook-configuration",
    );
    patch_as_manager(plane, kind, name, "/webhooks/-", &webhook);
}

/// The chart as an older version might have been: without one column of `kubectl get`.
fn older_chart(target: &Path) -> String {
    copy_folder(&repository("deploy/helm/kruise"), target);
    let file = target.join("files/crds/imagepulljobs.yaml");
    let mut crd: Value = serde_yaml::from_str(&fs::read_to_string(&file).unwrap()).unwrap();
    for version in crd["spec"]["versions"].as_array_mut().unwrap() {
        version["additionalPrinterColumns"]
            .as_array_mut()
            .unwrap()
            .remove(0);
    }
    fs::write(file, serde_yaml::to_string(&crd).unwrap()).unwrap();
    target.display().to_string()
}

pub fn copy_folder(source: &Path, target: &Path) {
    fs::create_dir_all(target).unwrap();
    for entry in fs::read_dir(source).unwrap() {
        let entry = entry.unwrap();
        let to = target.join(entry.file_name());
        if entry.path().is_dir() {
            copy_folder(&entry.path(), &to);
        } else {
            fs::copy(entry.path(), to).unwrap();
        }
    }
}

fn column_count(plane: &ControlPlane) -> usize {
    let crd = get(plane, "crd", "imagepulljobs.apps.kruise.io", "default");
    let columns = &crd["spec"]["versions"][0]["additionalPrinterColumns"];
    columns.as_array().unwrap().len()
}

#[test]
fn release_is_installed_upgraded_and_removed() {
    release_lifecycle(SERVER_SIDE);
}

#[test]
fn release_by_helm_3_is_installed_upgraded_and_removed() {
    release_lifecycle(CLIENT_SIDE);
}

fn release_lifecycle(method: &str) {
    let plane = &ControlPlane::start().unwrap();
    let folder = tempfile::tempdir().unwrap();
    let older = older_chart(&folder.path().join("kruise"));
    let values = image_values(folder.path());
    let images = ["--values", values.as_str()];
    let install = |chart: &str| {
        helm(
            plane,
            &[&["install", "kruise", chart, method], &images[..]].concat(),
        )
    };
    let upgrade = |values: &str| {
        let args = ["upgrade", "kruise", &chart(), "--set", values];
        helm(plane, &[&args[..], &images].concat())
    };
    install(&older).unwrap();
    let objects = installed(plane);
    let rendered = template(&[]).unwrap();
    assert_eq!(objects.len(), rendered.len(), "{method}: {objects:?}");
    create(plane, "crd/clonesets.apps.kruise.io", CLONE_SET);
    let (uid_before, columns) = (uid(plane, "cloneset", "web"), column_count(plane));

    // What the manager writes stays.
    let (mutating, ca) = ("mutatingwebhookconfiguration", json!("Y2E="));
    let configuration = "kruise-mutating-webhook-configuration";
    let ca_path = "/webhooks/0/clientConfig/caBundle";
    patch_as_manager(plane, mutating, configuration, ca_path, &ca);
    add_pod_webhook(plane);
    upgrade("manager.replicas=3,webhookConfiguration.timeoutSeconds=7").unwrap();
    assert_eq!(installed(plane), objects, "{method}");
    assert_eq!(
        column_count(plane),
        columns + 1,
        "{method}: the CRD was not upgraded"
    );
    let manager = get(plane, "deployment", "kruise-manager", "kruise-system");
    assert_eq!(manager["spec"]["replicas"], 3);
    let webhooks = &get(plane, mutating, configuration, "default")["webhooks"];
    let named = |name: &str| {
        let mut webhooks = webhooks.as_array().unwrap().iter();
        webhooks.find(|webhook| webhook["name"] == name).unwrap()
    };
    let webhook = named("mcloneset.kb.io");
    assert_eq!(webhook["clientConfig"]["caBundle"], ca, "{method}");
    assert_eq!(webhook["timeoutSeconds"], 7, "{method}");
    assert_eq!(
        named("log.mpod.kb.io")["clientConfig"]["url"],
        "https://127.0.0.1/mutate-pod"
    );
    assert_eq!(uid(plane, "cloneset", "web"), uid_before);

    helm(plane, &["rollback", "kruise", "1"]).unwrap();
    let manager = get(plane, "deployment", "kruise-manager", "kruise-system");
    assert_eq!(manager["spec"]["replicas"], 2);
    assert_eq!(column_count(plane), columns);

    // Objects of users stay, without CRDs in the release, too, and after the release.
    upgrade("crds.managed=false").unwrap();
    assert_eq!(uid(plane, "cloneset", "web"), uid_before);
    helm(plane, &["uninstall", "kruise"]).unwrap();
    let kept = installed(plane);
    let is_kept =
        |name: &&String| name.starts_with("customresourcedefinition") || name.starts_with("namespace/");
    assert_eq!(
        kept,
        objects.iter().filter(is_kept).cloned().collect::<Vec<_>>(),
        "{method}"
    );
    // The CRDs and both namespaces.
    assert_eq!(kept.len(), kruise_api::Kind::ALL.len() + 2);
    assert_eq!(uid(plane, "cloneset", "web"), uid_before);

    // The next release of that name takes what was kept, and upgrades it.
    install(&chart()).unwrap();
    assert_eq!(installed(plane), objects, "{method}");
    assert_eq!(
        column_count(plane),
        columns + 1,
        "{method}: the CRD was not upgraded"
    );
    assert_eq!(uid(plane, "cloneset", "web"), uid_before);
    helm(plane, &["uninstall", "kruise"]).unwrap();
}
