//! The rules for Pods that the recorded results do not show.

use serde_json::{Value, json};

use super::*;

/// The errors of a set with one container, changed by a patch, and with volume `v`.
fn found_in_container(patch: &Value) -> Vec<String> {
    let mut one = container("c");
    json_patch::merge(&mut one, patch);
    let errors =
        found_in(&json!({ "spec": { "containers": [one], "volumes": [{ "name": "v", "emptyDir": {} }] } }));
    let shorten = |error: String| error.replace("spec.containers[0].", "");
    errors.into_iter().map(shorten).collect()
}

#[test]
fn containers_have_the_rules_of_pods() {
    for (patch, errors) in [
        (json!({ "name": "A" }), vec!["Invalid name"]),
        (
            json!({ "name": "A".repeat(64) }),
            vec!["Invalid name", "Invalid name"],
        ),
        (json!({ "image": null }), vec!["Required image"]),
        (json!({ "image": " i" }), vec!["Invalid image"]),
        (
            json!({ "terminationMessagePolicy": "X" }),
            vec!["NotSupported terminationMessagePolicy"],
        ),
        (
            json!({ "restartPolicy": "Always" }),
            vec!["Forbidden restartPolicy"],
        ),
        (
            json!({ "ports": [{ "containerPort": 0, "protocol": "TCP" }] }),
            vec!["Required ports[0].containerPort"],
        ),
        (
            json!({ "ports": [{ "containerPort": 1, "protocol": "tcp", "name": "a--b", "hostPort": -1 }] }),
            vec![
                "Invalid ports[0].name",
                "Invalid ports[0].hostPort",
                "NotSupported ports[0].protocol",
            ],
        ),
        (
            json!({ "ports": [
                { "containerPort": 1, "protocol": "TCP", "name": "a", "hostPort": 5 },
                { "containerPort": 2, "protocol": "TCP", "name": "a", "hostPort": 5 } ] }),
            vec!["Duplicate ports[1].name", "Duplicate ports[1].hostPort"],
        ),
        (
            json!({ "env": [{ "name": "" }, { "name": "..a" }, { "name": "a", "valueFrom": {} }] }),
            vec![
                "Required env[0].name",
                "Invalid env[1].name",
                "Invalid env[2].valueFrom",
            ],
        ),
        (
            json!({ "volumeMounts": [{ "name": "v", "mountPath": "/a", "subPath": "/../x" }, { "name": "w" }] }),
            vec![
                "Invalid volumeMounts.subPath",
                "Invalid volumeMounts.subPath",
                "NotFound volumeMounts[1].name",
                "Required volumeMounts[1].mountPath",
            ],
        ),
        (
            json!({ "volumeDevices": [{ "name": "v", "devicePath": "/dev/x" }] }),
            vec!["Invalid volumeDevices[0].name"],
        ),
        (
            json!({ "resources": { "limits": { "cpu": 1 }, "requests": { "cpu": "1000m" } } }),
            vec![],
        ),
        (
            json!({ "resources": { "limits": { "cpu": 1 }, "requests": { "cpu": "1001m", "memory": "-1" } } }),
            vec!["Invalid resources.requests", "Invalid resources.requests[memory]"],
        ),
        (
            json!({ "resources": { "limits": { "a.b/gpu": 2 }, "requests": { "a.b/gpu": 1, "a.b/c": 1 } } }),
            vec!["Required resources.limits", "Invalid resources.requests"],
        ),
        (
            json!({ "resources": { "limits": { "cpu": "x" } } }),
            vec!["Invalid resources.limits[cpu]"],
        ),
        (json!({ "livenessProbe": {} }), vec!["Required livenessProbe"]),
        (
            json!({ "livenessProbe": { "exec": { "command": [] }, "tcpSocket": { "port": 1 }, "successThreshold": 2,
                "periodSeconds": -1, "terminationGracePeriodSeconds": 0 } }),
            vec![
                "Forbidden livenessProbe.tcpSocket",
                "Required livenessProbe.exec.command",
                "Invalid livenessProbe.periodSeconds",
                "Invalid livenessProbe.terminationGracePeriodSeconds",
                "Invalid livenessProbe.successThreshold",
            ],
        ),
        (
            json!({ "readinessProbe": { "grpc": { "port": 70000 }, "terminationGracePeriodSeconds": 5 } }),
            vec![
                "Invalid readinessProbe.grpc.port",
                "Invalid readinessProbe.terminationGracePeriodSeconds",
            ],
        ),
        // Defaults that OpenKruise does not set.
        (
            json!({ "startupProbe": { "httpGet": { "port": "http" } } }),
            vec![],
        ),
        (
            json!({ "lifecycle": { "preStop": { "sleep": { "seconds": 1 } }, "postStart": {} } }),
            vec!["Required lifecycle.postStart"],
        ),
        (
            json!({ "ports": "x", "env": {}, "lifecycle": { "preStop": 1 } }),
            vec!["Invalid ports", "Invalid env", "Invalid lifecycle.preStop"],
        ),
    ] {
        assert_eq!(found_in_container(&patch), errors, "{patch}");
    }
}

#[test]
fn names_are_unique_among_all_containers() {
    let all = |containers: &[&str], init: &[&str]| {
        let [containers, init] =
            [containers, init].map(|names| names.iter().map(|name| container(name)).collect::<Value>());
        found_in(&json!({ "spec": { "containers": containers, "initContainers": init } }))
    };
    assert_eq!(all(&["a", "b"], &["c", "d"]), [""; 0]);
    assert_eq!(
        all(&["a", "a"], &["a"]),
        [
            "Duplicate spec.containers[1].name",
            "Duplicate spec.initContainers[0].name"
        ]
    );
    assert_eq!(
        all(&["a"], &["b", "b"]),
        ["Duplicate spec.initContainers[1].name"]
    );
}

#[test]
fn hot_upgrade_gives_containers_two_names() {
    let found_with = |name: &str, other: &str, init: bool| {
        let mut hot = container(name);
        hot["upgradeStrategy"] = json!({ "upgradeType": "HotUpgrade", "hotUpgradeEmptyImage": "e" });
        let (list, other) = (["containers", "initContainers"], container(other));
        let mut spec = json!({ "containers": [hot] });
        match init {
            true => spec[list[1]] = json!([other]),
            false => spec[list[0]].as_array_mut().unwrap().push(other),
        }
        found_in(&json!({ "spec": spec }))
    };
    let [longest, longer] = [61, 62].map(|length| "a".repeat(length));
    for (name, other, errors) in [
        ("mesh", "log", vec![]),
        ("mesh", "mesh-3", vec![]),
        ("mesh", "mesh-1", vec!["Invalid spec.containers[0].name"]),
        ("mesh", "mesh-2", vec!["Invalid spec.containers[0].name"]),
        (&longest, "log", vec![]),
        (&longer, "log", vec!["Invalid spec.containers[0].name"]),
    ] {
        assert_eq!(found_with(name, other, false), errors, "{name} {other}");
        assert_eq!(found_with(name, other, true), errors, "{name} {other}");
    }
}

#[test]
fn only_valid_volumes_can_be_mounted() {
    let mut one = container("c");
    one["volumeMounts"] = json!([{ "name": "A", "mountPath": "/a" }, { "name": "v", "mountPath": "/v" }]);
    let volumes = json!([{ "name": "A" }, { "name": "v" }, { "name": "v" }, {}, null]);
    assert_eq!(
        found_in(&json!({ "spec": { "containers": [one], "volumes": volumes } })),
        [
            "Invalid spec.volumes[0].name",
            "Duplicate spec.volumes[2].name",
            "Required spec.volumes[3].name",
            "Required spec.volumes[4]",
            "Required spec.volumes[4].name",
            "NotFound spec.containers[0].volumeMounts[0].name",
        ]
    );
}
