//! The commands of `deploy/README.md` that find users of kruise-rs, that save and restore a Helm release, and that
//! replace kruise-rs by OpenKruise.

use std::process::Command;
use std::sync::LazyLock;

use serde_json::{Value, json};
use testbed::cluster::ControlPlane;

/// An API server without controllers and without programs of ours.
static PLANE: LazyLock<ControlPlane> = LazyLock::new(|| ControlPlane::start().unwrap());

/// The indented or plain code block that contains this text.
fn code_block(text: &str) -> String {
    let page = include_str!("../../deploy/README.md");
    let mut blocks = page
        .split("```")
        .skip(1)
        .step_by(2)
        .filter(|block| block.contains(text));
    let block = blocks
        .next()
        .unwrap_or_else(|| panic!("no block of code has {text:?}"));
    assert!(blocks.next().is_none(), "several blocks of code have {text:?}");
    block.to_owned()
}

/// Output of a shell script in which `kubectl` is the bed's.
fn run_shell(plane: &ControlPlane, script: &str) -> String {
    let kubectl = plane.kubectl_command();
    let folder = std::path::Path::new(kubectl.get_program()).parent().unwrap();
    let path = format!("{}:{}", folder.display(), std::env::var("PATH").unwrap());
    let mut command = Command::new("sh");
    command
        .args(["-c", script])
        .current_dir(plane.dir())
        .env("PATH", path);
    for (name, value) in kubectl.get_envs() {
        command.env(name, value.unwrap());
    }
    let output = command.output().unwrap();
    // Not by exit code: `grep` fails without a match, and a loop returns the status of its last command.
    let stderr = String::from_utf8(output.stderr).unwrap();
    let errors: Vec<_> = stderr
        .lines()
        .filter(|line| !line.starts_with("Warning: "))
        .collect();
    assert!(errors.is_empty(), "{script}: {stderr}");
    String::from_utf8(output.stdout).unwrap()
}

fn apply_objects(plane: &ControlPlane, objects: &[Value]) {
    let list = json!({ "apiVersion": "v1", "kind": "List", "items": objects });
    plane.apply(&list.to_string()).unwrap();
}

fn test_pod(name: &str, gates: &[&str], env: &Value, annotations: &Value) -> Value {
    let gates: Vec<_> = gates
        .iter()
        .map(|gate| json!({ "conditionType": gate }))
        .collect();
    json!({ "apiVersion": "v1", "kind": "Pod",
        "metadata": { "name": name, "namespace": "handbook", "annotations": annotations },
        "spec": { "readinessGates": gates, "serviceAccountName": "default", "automountServiceAccountToken": false,
            "containers": [{ "name": "a", "image": "i" }, { "name": "b", "image": "i", "env": env }] } })
}

fn table_column(table: &str, column: usize) -> Vec<&str> {
    let rows = table
        .lines()
        .map(|line| line.split_whitespace().collect::<Vec<_>>());
    let named = rows.filter(|row| row.contains(&"handbook"));
    named.map(|row| row[column]).collect()
}

#[test]
fn removal_commands_list_objects_that_need_the_manager() {
    let plane = &*PLANE;
    let namespace = json!({ "apiVersion": "v1", "kind": "Namespace", "metadata": { "name": "handbook" } });
    let account = json!({ "apiVersion": "v1", "kind": "ServiceAccount",
        "metadata": { "name": "default", "namespace": "handbook" } });
    apply_objects(plane, &[namespace, account]);
    let deployment = |name: &str, gates: Value| {
        json!({ "apiVersion": "apps/v1", "kind": "Deployment",
            "metadata": { "name": name, "namespace": "handbook" },
            "spec": { "selector": { "matchLabels": { "app": name } },
                "template": { "metadata": { "labels": { "app": name } },
                    "spec": { "readinessGates": gates, "containers": [{ "name": "a", "image": "i" }] } } } })
    };
    let both = json!([{ "conditionType": "other" }, { "conditionType": "KruisePodReady" }]);
    apply_objects(
        plane,
        &[deployment("gated", both), deployment("plain", json!([]))],
    );
    let workloads = run_shell(plane, &code_block("get deployments,statefulsets"));
    assert_eq!(table_column(&workloads, 2), ["gated"], "{workloads}");

    let (no_env, none, gates) = (json!([]), json!({}), ["InPlaceUpdateReady", "KruisePodReady"]);
    let barrier = json!([{ "name": "KRUISE_CONTAINER_BARRIER", "value": "x" }]);
    let complete = json!({ "apps.kruise.io/container-launch-priority-completed": "true" });
    let pods = [
        test_pod("plain", &[], &no_env, &none),
        test_pod("ready", &gates, &no_env, &none),
        test_pod("updated", &gates[..1], &no_env, &none),
        test_pod("held", &gates, &no_env, &none),
        test_pod("unscheduled", &gates, &no_env, &none),
        test_pod("ended", &gates, &no_env, &none),
        test_pod("waits", &[], &barrier, &none),
        test_pod("started", &[], &barrier, &complete),
    ];
    apply_objects(plane, &pods);
    let status = |pod: &str, status: Value| {
        let patch = json!({ "status": status }).to_string();
        let (flag, patch) = ("--subresource=status", format!("--patch={patch}"));
        let namespace_flag = "--namespace=handbook";
        plane
            .kubectl(&["patch", "pod", pod, namespace_flag, flag, &patch])
            .unwrap();
    };
    let conditions = |update: &str, kruise: &str| json!({ "conditions": [{ "type": gates[0], "status": update }, { "type": gates[1], "status": kruise }] });
    status("ready", conditions("True", "True"));
    status(
        "updated",
        json!({ "conditions": [{ "type": gates[0], "status": "False" }] }),
    );
    status("held", conditions("True", "False"));
    status("ended", json!({ "phase": "Failed" }));
    let lists = code_block("KRUISE_CONTAINER_BARRIER");
    let found = run_shell(plane, &lists);
    assert_eq!(
        table_column(&found, 1),
        ["held", "unscheduled", "updated", "waits"],
        "{found}"
    );
    assert_eq!(found.lines().count(), 4, "nothing else is printed: {found}");
}

/// With two revisions of some hundred kilobytes, too large for the annotation of `kubectl apply`.
#[test]
fn saved_helm_release_can_be_restored() {
    let plane = &*PLANE;
    let namespace = json!({ "apiVersion": "v1", "kind": "Namespace", "metadata": { "name": "releases" } });
    apply_objects(plane, &[namespace]);
    let release = |revision: u8| {
        json!({ "apiVersion": "v1", "kind": "Secret", "type": "helm.sh/release.v1",
            "metadata": { "name": format!("sh.helm.release.v1.kruise.v{revision}"), "namespace": "releases",
                "labels": { "owner": "helm", "name": "kruise", "version": revision.to_string() } },
            "stringData": { "release": format!("{revision}").repeat(300_000) } })
    };
    apply_objects(plane, &[release(1), release(2)]);
    let with_names = |script: &str| {
        let script = script.replace("RELEASE_NAMESPACE", "releases");
        script.replace("name=RELEASE", "name=kruise")
    };
    let data = || {
        let path = "--output=jsonpath={range .items[*]}{.metadata.name}{.metadata.labels}{.type}{.data}{end}";
        plane
            .kubectl(&["get", "secrets", "--namespace=releases", path])
            .unwrap()
    };
    let before = data();
    assert!(before.len() > 800_000);
    run_shell(plane, &with_names(&code_block("kruise-release.yaml")));
    assert_eq!(data(), "");
    let page = include_str!("../../deploy/README.md");
    let restore = "kubectl create -f kruise-release.yaml";
    assert!(page.contains(&format!("`{restore}`")));
    run_shell(plane, restore);
    assert_eq!(data(), before);
}

#[test]
fn rollback_commands_list_claims_owned_by_pods() {
    let plane = &*PLANE;
    let namespace = json!({ "apiVersion": "v1", "kind": "Namespace", "metadata": { "name": "given" } });
    let claim = |name: &str, kind: &str| {
        json!({ "apiVersion": "v1", "kind": "PersistentVolumeClaim",
            "metadata": { "name": name, "namespace": "given",
                "labels": { "apps.kruise.io/cloneset-instance-id": "abcde" },
                "ownerReferences": [{ "apiVersion": "v1", "kind": kind, "name": "web-abcde", "uid": "u" }] },
            "spec": { "accessModes": ["ReadWriteOnce"], "resources": { "requests": { "storage": "1Gi" } } } })
    };
    apply_objects(
        plane,
        &[namespace, claim("kept", "CloneSet"), claim("given", "Pod")],
    );
    let found = run_shell(plane, &code_block("get pvc"));
    let rows: Vec<Vec<_>> = found
        .lines()
        .map(|line| line.split_whitespace().collect())
        .collect();
    assert_eq!(rows, [["given", "given", "Pod", "web-abcde"]], "{found}");
}

#[test]
fn rollback_commands_remove_other_namespace_installation() {
    let plane = &*PLANE;
    let folder = concat!(env!("CARGO_MANIFEST_DIR"), "/../deploy/");
    let manifests = plane
        .kubectl(&["kustomize", &format!("{folder}default")])
        .unwrap();
    plane
        .apply(&manifests.replace("kruise-system", "elsewhere"))
        .unwrap();
    let kinds = "daemonsets,deployments,services,networkpolicies,poddisruptionbudgets,\
                 validatingadmissionpolicies,validatingadmissionpolicybindings,\
                 mutatingwebhookconfigurations,validatingwebhookconfigurations";
    let installed = || {
        let label = "--selector=app.kubernetes.io/part-of=kruise-rs";
        plane
            .kubectl(&["get", kinds, "--all-namespaces", label, "--output=name"])
            .unwrap()
    };
    assert!(installed().lines().count() > 20);
    let script = code_block("NAMESPACE=kruise-system").replace("=kruise-system", "=elsewhere");
    run_shell(plane, &script.replace("deploy/", folder));
    assert_eq!(installed(), "");
    let path = "--output=jsonpath={.items[*].spec.conversion.webhook.clientConfig.service.namespace}";
    let namespaces = plane.kubectl(&["get", "crds", path]).unwrap();
    assert!(
        namespaces.split(' ').all(|name| name.trim() == "elsewhere"),
        "{namespaces}"
    );
}
