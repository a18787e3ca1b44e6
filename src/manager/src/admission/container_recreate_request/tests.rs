#![allow(clippy::unwrap_used, clippy::panic)]

use proptest::prelude::*;

use super::*;
use crate::admission::review::Object;

fn pod(change: impl FnOnce(&mut Value)) -> PodLookup {
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
    PodLookup {
        pod: Some(serde_json::from_value(pod).unwrap()),
        virtual_node: false,
    }
}

fn status(name: &str, id: &str, restarts: i32) -> Value {
    json!({ "name": name, "containerID": id, "restartCount": restarts, "ready": true, "image": "", "imageID": "" })
}

fn request(containers: Value) -> Request {
    request_for(
        json!({ "metadata": { "name": "r" }, "spec": { "podName": "web", "containers": containers } }),
    )
}

fn request_for(object: Value) -> Request {
    Request {
        object: Object::for_test(object),
        old: None,
        namespace: "ns".into(),
        version: "v1beta1".into(),
        strict: false,
    }
}

fn allowed(request: &Request, lookup: &PodLookup) -> Value {
    match decide(request, lookup) {
        Decision::Allow { object, .. } => object,
        Decision::Deny { message: why, .. } => panic!("{why}"),
    }
}

fn denied(request: &Request, lookup: &PodLookup) -> String {
    match decide(request, lookup) {
        Decision::Deny {
            code: 422,
            message: why,
        } => why,
        other => panic!("{other:?}"),
    }
}

#[test]
fn request_is_completed_from_the_pod() {
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
fn native_sidecar_can_be_recreated() {
    let object = allowed(&request(json!([{ "name": "proxy" }])), &pod(|_| ()));
    assert_eq!(
        object["spec"]["containers"][0]["statusContext"]["containerID"],
        "containerd://p"
    );
}

#[test]
fn user_values_are_kept() {
    let review_request = request_for(json!({
        "metadata": { "labels": { "mine": "1", keys::CRR_NODE_NAME: "elsewhere" } },
        "spec": { "podName": "web", "containers": [{ "name": "app" }],
            "strategy": { "failurePolicy": "Ignore", "terminationGracePeriodSeconds": 0 } },
    }));
    let object = allowed(&review_request, &pod(|_| ()));
    assert_eq!(
        object["spec"]["strategy"],
        review_request.object["spec"]["strategy"]
    );
    assert_eq!(object["metadata"]["labels"]["mine"], "1");
    assert_eq!(object["metadata"]["labels"][keys::CRR_NODE_NAME], "n1");
}

#[test]
fn grace_period_is_capped_at_i32() {
    let pod = pod(|pod| pod["spec"]["terminationGracePeriodSeconds"] = json!(i64::MAX));
    let object = allowed(&request(json!([{ "name": "app" }])), &pod);
    let filled = &object["spec"]["strategy"]["terminationGracePeriodSeconds"];
    assert_eq!(*filled, json!(i32::MAX));
}

#[test]
fn virtual_node_is_labelled() {
    let mut lookup = pod(|_| ());
    lookup.virtual_node = true;
    let object = allowed(&request(json!([{ "name": "app" }])), &lookup);
    assert_eq!(
        object["metadata"]["labels"][keys::TYPE],
        keys::TYPE_VIRTUAL_KUBELET
    );
}

#[test]
fn long_node_name_is_shortened_to_a_label() {
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

/// The manager and the daemon of the node keep requests in memory.
#[test]
fn request_that_would_be_large_is_refused() {
    let arguments = |count: usize| {
        let lookup = pod(move |pod| {
            let command = vec!["x"; count];
            pod["spec"]["containers"][0]["lifecycle"] =
                json!({ "preStop": { "exec": { "command": command } } });
        });
        let name = lookup.pod.as_ref().unwrap().spec.as_ref().unwrap().containers[0]
            .name
            .clone();
        (request(json!([{ "name": name }])), lookup)
    };
    let (review_request, lookup) = arguments(1000);
    allowed(&review_request, &lookup);
    let (review_request, lookup) = arguments(50_000);
    let why = denied(&review_request, &lookup);
    assert!(
        why.contains("spec.containers") && why.contains("preStop"),
        "{why}"
    );

    let with_id = |id: String| {
        request_for(json!({
            "metadata": { "annotations": { keys::CRR_CONTAINER_ID: id } },
            "spec": { "podName": "web", "containers": [{ "name": "app" }] },
        }))
    };
    allowed(&with_id("i".repeat(1024)), &pod(|_| ()));
    let why = denied(&with_id("i".repeat(1025)), &pod(|_| ()));
    assert!(
        why.contains(keys::CRR_CONTAINER_ID) && why.contains("1024 bytes"),
        "{why}"
    );
}

#[test]
fn unsuitable_pods_are_refused() {
    let review_request = request(json!([{ "name": "app" }]));
    let field = "spec.podName: Invalid value: \"web\": ";
    for (lookup, why) in [
        (PodLookup::default(), "there is no such Pod in namespace \"ns\""),
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
        assert_eq!(denied(&review_request, &lookup), format!("{field}{why}"));
    }
    let named = |name: Value| super::tests::request_for(json!({ "spec": { "podName": name } }));
    assert!(denied(&named(Value::Null), &PodLookup::default()).starts_with("spec.podName: Required value"));
    let why = denied(&named(json!("x?y=")), &PodLookup::default());
    assert!(
        why.starts_with("spec.podName: Invalid value: \"x?y=\": a lowercase RFC 1123 subdomain"),
        "{why}"
    );
}

/// Sidecars of a terminal Pod can be recreated while they are being stopped.
#[test]
fn sidecars_of_a_finished_pod_are_recreated() {
    let lookup = pod(|pod| {
        pod["status"]["phase"] = json!("Failed");
        pod["status"]["conditions"] = json!([{ "type": keys::SIDECAR_TERMINATED, "status": "True" }]);
    });
    allowed(&request(json!([{ "name": "log" }])), &lookup);
}

/// The Pod that the request was created for was replaced by another one of its name meanwhile.
#[test]
fn request_of_an_earlier_pod_is_refused() {
    let of_pod = |uid: &str| {
        let owner =
            json!([{ "apiVersion": "v1", "kind": "Pod", "name": "web", "uid": uid, "controller": true }]);
        request_for(json!({ "metadata": { "name": "r", "ownerReferences": owner },
            "spec": { "podName": "web", "containers": [{ "name": "log" }] } }))
    };
    allowed(&of_pod("u-1"), &pod(|_| ()));
    let why = denied(&of_pod("u-0"), &pod(|_| ()));
    assert!(
        why.contains("spec.podName: Invalid value: \"web\": another Pod has this name now"),
        "{why}"
    );
}

/// The label names the Pod that its creator has seen, whatever controls the request.
#[test]
fn request_with_the_uid_of_an_earlier_pod_is_refused() {
    let labelled = |labels: Value| {
        request_for(json!({ "metadata": { "name": "r", "labels": labels },
            "spec": { "podName": "web", "containers": [{ "name": "log" }] } }))
    };
    allowed(&labelled(json!({ keys::CRR_POD_UID: "u-1" })), &pod(|_| ()));
    // A copy of a stored request.
    let copied = json!({ keys::CRR_POD_UID: "u-0", keys::CRR_NODE_NAME: "node" });
    allowed(&labelled(copied), &pod(|_| ()));
    let why = denied(&labelled(json!({ keys::CRR_POD_UID: "u-0" })), &pod(|_| ()));
    assert!(
        why.contains("spec.podName: Invalid value: \"web\": another Pod has this name now")
            && why.contains(keys::CRR_POD_UID),
        "{why}"
    );
}

#[test]
fn unsuitable_containers_are_refused() {
    let review_request = request(json!([
        { "name": "nope" }, { "name": "setup" }, { "name": "late" }, { "name": "app" }, { "name": "app" },
        { "name": "log", "preStop": { "exec": { "command": ["sh"] } } },
    ]));
    let why = denied(&review_request, &pod(|_| ()));
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
    /// An admitted request records each container once and keeps everything that the user wrote. Deciding again about
    /// the result rejects it, because the read-only fields are set.
    #[test]
    fn admitted_requests_are_complete(names in proptest::collection::vec("app|log|late|proxy|setup|x", 0..4), note in "[a-z]{0,3}") {
        let containers: Vec<_> = names.iter().map(|name| json!({ "name": name })).collect();
        let review_request = request_for(json!({ "metadata": { "labels": { "note": note } },
            "spec": { "podName": "web", "containers": containers } }));
        let valid = !names.is_empty()
            && names.iter().collect::<BTreeSet<_>>().len() == names.len()
            && names.iter().all(|name| ["app", "log", "proxy"].contains(&name.as_str()));
        match decide(&review_request, &pod(|_| ())) {
            Decision::Deny { message, .. } => prop_assert!(!valid && message.contains("spec.containers"), "{}", message),
            Decision::Allow { object, .. } => {
                prop_assert!(valid);
                prop_assert_eq!(&object["metadata"]["labels"]["note"], &json!(note));
                for (container, name) in object["spec"]["containers"].as_array().unwrap().iter().zip(&names) {
                    prop_assert_eq!(&container["name"], name);
                    prop_assert!(container["statusContext"]["containerID"].is_string());
                }
                let repeated = Request { object: Object::for_test(object), ..review_request };
                let refused = matches!(decide(&repeated, &pod(|_| ())), Decision::Deny { code: 422, .. });
                prop_assert!(refused);
            }
        }
    }
}
