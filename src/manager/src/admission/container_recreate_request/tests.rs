#![allow(clippy::unwrap_used, clippy::panic)]

use proptest::prelude::*;

use super::*;
use crate::admission::review::Object;

fn pod(change: impl FnOnce(&mut Value)) -> Seen {
    let mut pod = json!({
        "metadata": { "name": "web", "namespace": "ns", "uid": "u-1" },
        "spec": {
            "nodeName": "n1",
            "terminationGracePeriodSeconds": 7,
            "initContainers": [{ "name": "setup" }, { "name": "proxy", "restartPolicy": "Always" }],
            "containers": [
                { "name": "app", "ports": [{ "name": "http", "containerPort": 80 }],
                  "lifecycle": { "preStop": { "httpGet": { "port": "http", "path": "/bye" } } } },
                { "name": "log", "ports": [{ "containerPort": 9 }],
                  "lifecycle": { "preStop": { "sleep": { "seconds": 2 } } } },
                { "name": "late" },
            ],
        },
        "status": {
            "phase": "Running",
            "containerStatuses": [
                status("app", "containerd://a", 3), status("log", "containerd://l", 0), status("late", "", 0),
            ],
            "initContainerStatuses": [status("setup", "containerd://s", 0), status("proxy", "containerd://p", 1)],
        },
    });
    change(&mut pod);
    Seen {
        pod: Some(serde_json::from_value(pod).unwrap()),
        virtual_node: false,
    }
}

fn status(name: &str, id: &str, restarts: i32) -> Value {
    json!({ "name": name, "containerID": id, "restartCount": restarts, "ready": true, "image": "", "imageID": "" })
}

fn request(containers: Value) -> Request {
    asked(json!({ "metadata": { "name": "r" }, "spec": { "podName": "web", "containers": containers } }))
}

fn asked(object: Value) -> Request {
    Request {
        object: Object::of(object),
        old: None,
        namespace: "ns".into(),
        version: "v1beta1".into(),
        strict: false,
    }
}

fn allowed(asked: &Request, seen: &Seen) -> Value {
    match decide(asked, seen) {
        Decision::Allow { object, .. } => object,
        Decision::Deny { why, .. } => panic!("{why}"),
    }
}

fn denied(asked: &Request, seen: &Seen) -> String {
    match decide(asked, seen) {
        Decision::Deny { code: 422, why } => why,
        other => panic!("{other:?}"),
    }
}

#[test]
fn a_request_is_completed_from_the_pod() {
    let object = allowed(
        &request(json!([{ "name": "app" }, { "name": "log" }])),
        &pod(|_| ()),
    );
    assert_eq!(
        object["metadata"]["labels"],
        json!({ keys::CRR_ACTIVE: "true", keys::CRR_NODE_NAME: "n1", keys::CRR_POD_UID: "u-1" })
    );
    assert_eq!(
        object["spec"]["strategy"],
        json!({ "failurePolicy": "Fail", "terminationGracePeriodSeconds": 7 })
    );
    assert_eq!(
        object["spec"]["containers"],
        json!([
            { "name": "app", "preStop": { "httpGet": { "port": "http", "path": "/bye" } },
              "ports": [{ "name": "http", "containerPort": 80 }],
              "statusContext": { "containerID": "containerd://a", "restartCount": 3 } },
            { "name": "log", "preStop": { "sleep": { "seconds": 2 } },
              "statusContext": { "containerID": "containerd://l", "restartCount": 0 } },
        ])
    );
}

#[test]
fn a_native_sidecar_can_be_recreated() {
    let object = allowed(&request(json!([{ "name": "proxy" }])), &pod(|_| ()));
    assert_eq!(
        object["spec"]["containers"][0]["statusContext"]["containerID"],
        "containerd://p"
    );
}

#[test]
fn the_users_own_values_stay() {
    let asked = asked(json!({
        "metadata": { "labels": { "mine": "1", keys::CRR_NODE_NAME: "elsewhere" } },
        "spec": { "podName": "web", "containers": [{ "name": "app" }],
            "strategy": { "failurePolicy": "Ignore", "terminationGracePeriodSeconds": 0 } },
    }));
    let object = allowed(&asked, &pod(|_| ()));
    assert_eq!(object["spec"]["strategy"], asked.object["spec"]["strategy"]);
    assert_eq!(object["metadata"]["labels"]["mine"], "1");
    assert_eq!(object["metadata"]["labels"][keys::CRR_NODE_NAME], "n1");
}

#[test]
fn a_pods_grace_period_is_cut_to_what_the_field_takes() {
    let pod = pod(|pod| pod["spec"]["terminationGracePeriodSeconds"] = json!(i64::MAX));
    let object = allowed(&request(json!([{ "name": "app" }])), &pod);
    let filled = &object["spec"]["strategy"]["terminationGracePeriodSeconds"];
    assert_eq!(*filled, json!(i32::MAX));
}

#[test]
fn a_virtual_node_is_marked() {
    let mut seen = pod(|_| ());
    seen.virtual_node = true;
    let object = allowed(&request(json!([{ "name": "app" }])), &seen);
    assert_eq!(
        object["metadata"]["labels"][keys::TYPE],
        keys::TYPE_VIRTUAL_KUBELET
    );
}

#[test]
fn a_long_node_name_becomes_a_label() {
    let name = "n".repeat(200);
    let object = allowed(
        &request(json!([{ "name": "app" }])),
        &pod(|pod| pod["spec"]["nodeName"] = json!(name)),
    );
    let label = object["metadata"]["labels"][keys::CRR_NODE_NAME]
        .as_str()
        .unwrap();
    assert!(label.len() <= 63 && keys::crr_selector(&name).contains(label));
}

#[test]
fn pods_that_take_no_requests_are_named() {
    let asked = request(json!([{ "name": "app" }]));
    let field = "spec.podName: Invalid value: \"web\": ";
    for (seen, why) in [
        (Seen::default(), "there is no such Pod in namespace \"ns\""),
        (
            pod(|pod| pod["status"]["phase"] = json!("Succeeded")),
            "the Pod has ended, its phase is Succeeded",
        ),
        (
            pod(|pod| pod["metadata"]["deletionTimestamp"] = json!("2026-01-01T00:00:00Z")),
            "the Pod is being deleted",
        ),
        (
            pod(|pod| pod["spec"]["nodeName"] = Value::Null),
            "the Pod is not on a node yet",
        ),
    ] {
        assert_eq!(denied(&asked, &seen), format!("{field}{why}"));
    }
    let of = |name: Value| super::tests::asked(json!({ "spec": { "podName": name } }));
    assert!(denied(&of(Value::Null), &Seen::default()).starts_with("spec.podName: Required value"));
    let why = denied(&of(json!("x?y=")), &Seen::default());
    assert!(
        why.starts_with("spec.podName: Invalid value: \"x?y=\": a lowercase RFC 1123 subdomain"),
        "{why}"
    );
}

/// An ended Pod whose sidecars are still being ended may have them recreated.
#[test]
fn sidecars_of_an_ended_pod_may_go() {
    let seen = pod(|pod| {
        pod["status"]["phase"] = json!("Failed");
        pod["status"]["conditions"] = json!([{ "type": keys::SIDECAR_TERMINATED, "status": "True" }]);
    });
    allowed(&request(json!([{ "name": "log" }])), &seen);
}

#[test]
fn containers_that_cannot_be_recreated_are_named() {
    let asked = request(json!([
        { "name": "nope" }, { "name": "setup" }, { "name": "late" }, { "name": "app" }, { "name": "app" },
        { "name": "log", "preStop": { "exec": { "command": ["sh"] } } },
    ]));
    let why = denied(&asked, &pod(|_| ()));
    for part in [
        "spec.containers[0].name: Invalid value: \"nope\": the Pod has no such container; \
         containers that can be recreated: app, log, late, proxy",
        "spec.containers[1].name: Invalid value: \"setup\": this is an init container that runs only once",
        "spec.containers[2].name: Invalid value: \"late\": this container has not been started yet",
        "spec.containers[4].name: Invalid value: \"app\": this container is in the list twice",
        "spec.containers[5].preStop: Invalid value: {\"exec\":{\"command\":[\"sh\"]}}: this field is read-only",
    ] {
        assert!(why.contains(part), "{part} is not in {why}");
    }
    assert!(denied(&request(json!([])), &pod(|_| ())).contains("spec.containers: Required value"));
    let many = vec![json!({}); 1_000_000];
    let why = denied(&request(json!(many)), &pod(|_| ()));
    assert_eq!(
        why,
        "spec.containers: Too many: 1000000: must have at most 256 items"
    );
}

proptest! {
    /// Whatever is asked, a request that passes says of each container what ran, once each, and nothing of
    /// what the user wrote is lost; deciding once more about what was decided is refused, for then the
    /// read-only fields are there.
    #[test]
    fn what_passes_is_complete(names in proptest::collection::vec("app|log|late|proxy|setup|x", 0..4), note in "[a-z]{0,3}") {
        let containers: Vec<_> = names.iter().map(|name| json!({ "name": name })).collect();
        let asked = asked(json!({ "metadata": { "labels": { "note": note } },
            "spec": { "podName": "web", "containers": containers } }));
        let good = !names.is_empty()
            && names.iter().collect::<BTreeSet<_>>().len() == names.len()
            && names.iter().all(|name| ["app", "log", "proxy"].contains(&name.as_str()));
        match decide(&asked, &pod(|_| ())) {
            Decision::Deny { why, .. } => prop_assert!(!good && why.contains("spec.containers"), "{}", why),
            Decision::Allow { object, .. } => {
                prop_assert!(good);
                prop_assert_eq!(&object["metadata"]["labels"]["note"], &json!(note));
                for (container, name) in object["spec"]["containers"].as_array().unwrap().iter().zip(&names) {
                    prop_assert_eq!(&container["name"], name);
                    prop_assert!(container["statusContext"]["containerID"].is_string());
                }
                let again = Request { object: Object::of(object), ..asked };
                let refused = matches!(decide(&again, &pod(|_| ())), Decision::Deny { code: 422, .. });
                prop_assert!(refused);
            }
        }
    }
}
