//! A release of OpenKruise's chart becomes one of ours, and ours becomes one of OpenKruise's.

use std::fs;
use std::path::Path;

use base64::Engine;
use base64::engine::general_purpose::STANDARD;
use serde_json::{Value, json};
use testbed::cluster::ControlPlane;

use crate::releases::{CLONE_SET, add_pod_webhook, copy_folder, create, get, patch_as_manager, uid};
use crate::{CLIENT_SIDE, Objects, REGISTRY, SERVER_SIDE, chart, helm, image_values, objects, repository};

/// An object of a kind that kruise-rs does not have.
const BROADCAST_JOB: &str = r#"{"apiVersion":"apps.kruise.io/v1beta1","kind":"BroadcastJob",
    "metadata":{"name":"all","namespace":"default"},"spec":{}}"#;

/// The chart that stands in for OpenKruise's, with its CRDs.
fn openkruise_chart(target: &Path) -> String {
    copy_folder(&repository("tests/data/openkruise-chart"), target);
    copy_folder(&repository("tests/data/crds"), &target.join("files"));
    target.display().to_string()
}

/// Whether `live` has all fields of `wanted`, and lists exactly as long.
fn contains(live: &Value, wanted: &Value) -> bool {
    match (live, wanted) {
        (Value::Object(live), Value::Object(wanted)) => wanted
            .iter()
            .all(|(key, value)| value.is_null() || live.get(key).is_some_and(|live| contains(live, value))),
        (Value::Array(live), Value::Array(wanted)) => {
            live.len() == wanted.len()
                && live
                    .iter()
                    .zip(wanted)
                    .all(|(live, wanted)| contains(live, wanted))
        }
        (live, wanted) => live == wanted || (live.is_null() && wanted == &Value::Array(vec![])),
    }
}

/// Asserts that the objects of the release are in the cluster, without what another chart added to their lists.
fn assert_applied(plane: &ControlPlane) {
    let manifest: Objects = objects(&helm(plane, &["get", "manifest", "kruise"]).unwrap());
    assert!(manifest.len() > 15);
    for (key, wanted) in manifest {
        let metadata = &wanted["metadata"];
        let kind = wanted["kind"].as_str().unwrap();
        let namespace = metadata["namespace"].as_str().unwrap_or("default");
        let live = get(plane, kind, metadata["name"].as_str().unwrap(), namespace);
        for field in ["spec", "rules", "webhooks", "subjects", "roleRef"] {
            assert!(
                contains(&live[field], &wanted[field]) || wanted[field].is_null(),
                "{key}: {live:#}"
            );
        }
    }
}

fn names(plane: &ControlPlane, kinds: &str) -> Vec<String> {
    let args = ["get", kinds, "--all-namespaces", "--output=name"];
    let names = plane.kubectl(&args).unwrap();
    names.lines().map(str::to_owned).collect()
}

fn readiness_probe(plane: &ControlPlane) -> Value {
    let daemons = get(plane, "daemonset", "kruise-daemon", "kruise-system");
    daemons["spec"]["template"]["spec"]["containers"][0]["readinessProbe"].clone()
}

#[test]
fn release_of_openkruise_becomes_ours_and_openkruise_again() {
    change_over_and_back(SERVER_SIDE);
}

#[test]
fn release_of_openkruise_by_helm_3_becomes_ours_and_openkruise_again() {
    change_over_and_back(CLIENT_SIDE);
}

fn change_over_and_back(method: &str) {
    let plane = &ControlPlane::start().unwrap();
    let folder = tempfile::tempdir().unwrap();
    let theirs = openkruise_chart(&folder.path().join("kruise"));
    helm(plane, &["install", "kruise", &theirs, method]).unwrap();
    create(plane, "crd/clonesets.apps.kruise.io", CLONE_SET);
    create(plane, "crd/broadcastjobs.apps.kruise.io", BROADCAST_JOB);
    let uids = || ["cloneset/web", "broadcastjob/all"].map(|name| uid_of(plane, name));
    let before = uids();
    assert_applied(plane);

    // Without values, the Pods would be replaced by ones that never start.
    let refused = helm(plane, &["upgrade", "kruise", &chart()]).unwrap_err();
    assert!(refused.contains("does not resolve"), "{refused}");
    let values = image_values(folder.path());
    let run_commands = |commands: &str| run_commands(plane, commands, &theirs, &values);

    // An upgrade would delete a CRD; the message has the command that keeps it.
    let less = [
        "upgrade",
        "kruise",
        &chart(),
        "--values",
        &values,
        "--set",
        "installation.createNamespace=false,crds.managed=false",
    ];
    let refused = helm(plane, &less).unwrap_err();
    assert!(
        refused.contains("customresourcedefinition/clonesets.apps.kruise.io"),
        "{refused}"
    );
    assert!(refused.contains("namespace/kruise-system"), "{refused}");
    let [dry_run, change_over, back] = documented_commands().try_into().unwrap();
    let refused = run_commands(&dry_run).unwrap_err();
    let command = refused.lines().find_map(|line| line.split_once("To keep them: "));
    let command = command.unwrap_or_else(|| panic!("{refused}")).1;
    assert!(
        command.contains("broadcastjobs.apps.kruise.io") && !command.contains("clonesets"),
        "{refused}"
    );
    run_commands(command).unwrap();
    run_commands(&dry_run).unwrap();

    run_commands(&change_over).unwrap();
    assert_applied(plane);
    let managers = ["deployment.apps/kruise-manager", "deployment.apps/kruise-webhook"];
    assert_eq!(names(plane, "deployments"), managers, "{method}");
    assert_eq!(uids(), before, "{method}");
    assert!(readiness_probe(plane).is_object());

    // As our manager does. OpenKruise does not convert NodeImages: their CA must not stay.
    let ca = json!(STANDARD.encode(fs::read(plane.ca()).unwrap()));
    for crd in ["clonesets.apps.kruise.io", "nodeimages.apps.kruise.io"] {
        let path = "/spec/conversion/webhook/clientConfig/caBundle";
        patch_as_manager(plane, "crd", crd, path, &ca);
    }
    add_pod_webhook(plane);
    run_commands(&back).unwrap();
    let given = helm(plane, &["get", "values", "kruise"]).unwrap();
    assert!(!given.contains(REGISTRY), "{method}: {given}");
    assert_applied(plane);
    let managers = ["deployment.apps/kruise-controller-manager"];
    assert_eq!(names(plane, "deployments"), managers, "{method}");
    let policies = "validatingadmissionpolicies,networkpolicies,poddisruptionbudgets,resourcequotas";
    assert!(names(plane, policies).is_empty(), "{method}");
    assert!(readiness_probe(plane).is_null(), "{method}");
    assert_eq!(uids(), before, "{method}");

    // Also without deleting anything first.
    helm(plane, &["upgrade", "kruise", &chart(), "--values", &values]).unwrap();
    assert_applied(plane);
    assert_eq!(uids(), before, "{method}");
}

/// The blocks of commands of the README: the dry run, the change-over, and the way back.
fn documented_commands() -> Vec<String> {
    let readme = fs::read_to_string(repository("deploy/helm/kruise/README.md")).unwrap();
    let section = readme.split("## In the place of OpenKruise").nth(1).unwrap();
    section
        .split("```")
        .skip(1)
        .step_by(2)
        .map(str::to_owned)
        .collect()
}

/// Runs commands of kubectl and helm, one a line, with the charts and the file of values of the test.
fn run_commands(plane: &ControlPlane, commands: &str, theirs: &str, values: &str) -> Result<(), String> {
    for command in commands.lines().filter(|line| !line.is_empty()) {
        let chart = chart();
        let words = command.split(' ').filter_map(|word| match word {
            "deploy/helm/kruise" => Some(chart.as_str()),
            "openkruise/kruise" => Some(theirs),
            "values.yaml" => Some(values),
            // There is no shell.
            ">" | "/dev/null" => None,
            word => Some(word),
        });
        let words: Vec<&str> = words.collect();
        match words[0] {
            "kubectl" => plane.kubectl(&words[1..]).map_err(|error| error.to_string())?,
            "helm" => helm(plane, &words[1..])?,
            program => panic!("{program} in {command}"),
        };
    }
    Ok(())
}

fn uid_of(plane: &ControlPlane, name: &str) -> Value {
    let (kind, name) = name.split_once('/').unwrap();
    uid(plane, kind, name)
}

/// `--reuse-values` would take OpenKruise's image.
#[test]
fn image_of_openkruise_is_refused() {
    let values = "manager.image.repository=registry.example/openkruise/kruise-manager";
    let refused = crate::template(&["--set", values]).unwrap_err();
    assert!(refused.contains("is that of OpenKruise"), "{refused}");
}

/// The stand-in has the names of OpenKruise's objects that ours replace.
#[test]
fn stand_in_has_the_names_that_both_use() {
    let theirs =
        fs::read_to_string(repository("tests/data/openkruise-chart/templates/objects.yaml")).unwrap();
    let (theirs, ours) = (objects(&theirs), crate::template(&[]).unwrap());
    let shared: Vec<_> = theirs.keys().filter(|key| ours.contains_key(*key)).collect();
    assert!(shared.len() > 10, "{shared:?}");
}
