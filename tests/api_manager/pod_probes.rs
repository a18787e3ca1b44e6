//! PodProbeMarkers: their probes are distributed to nodes whose daemons the tests play, and results mark the Pods.

use k8s_openapi::api::core::v1::Pod;
use kruise_api::node_pod_probe::NodePodProbe;
use kruise_api::pod_probe_marker::PodProbeMarker;
use kube::ResourceExt;
use kube::api::{Api, DeleteParams, Patch, PatchParams};
use serde_json::{Value, json};

use crate::test_cluster::{create, create_nodes, shared_cluster, wait_until, wait_until_deleted};

/// A namespace with one node for its Pods.
struct ProbeFixture {
    name: &'static str,
    markers: Api<PodProbeMarker>,
    pods: Api<Pod>,
    nodes: Api<NodePodProbe>,
}

impl ProbeFixture {
    async fn new(name: &'static str) -> Self {
        let admin = shared_cluster().admin().await;
        shared_cluster()
            .plane
            .kubectl(&["create", "namespace", name])
            .unwrap();
        // No controller creates it here, and Pods need it.
        let account = ["create", "serviceaccount", "default", "--namespace", name];
        shared_cluster().plane.kubectl(&account).unwrap();
        create_nodes(&admin, &[name], json!({})).await;
        Self {
            name,
            markers: Api::namespaced(admin.client.clone(), name),
            pods: Api::namespaced(admin.client.clone(), name),
            nodes: Api::all(admin.client),
        }
    }

    async fn create_pod(&self, name: &str, ip: &str, labels: Value) -> Pod {
        let pod = json!({ "metadata": { "name": name, "namespace": self.name, "labels": labels },
            "spec": { "nodeName": self.name, "terminationGracePeriodSeconds": 0,
                "readinessGates": [{ "conditionType": "game.io/gate" }],
                "containers": [{ "name": "app", "image": "i", "ports": [{ "name": "http", "containerPort": 8080 }] }] } });
        let pod: Pod = create(&self.pods, pod).await;
        let status = json!({ "status": { "phase": "Running", "podIP": ip, "podIPs": [{ "ip": ip }],
            "conditions": [{ "type": "Initialized", "status": "True" }] } });
        let patch = Patch::Strategic(status);
        self.pods
            .patch_status(name, &PatchParams::default(), &patch)
            .await
            .unwrap();
        pod
    }

    async fn create_marker(&self, name: &str, labels: Value, probes: Value) -> PodProbeMarker {
        let marker = json!({ "metadata": { "name": name, "namespace": self.name },
            "spec": { "selector": { "matchLabels": labels }, "probes": probes } });
        create(&self.markers, marker).await
    }

    /// Waits until the node's NodePodProbe lists exactly these probes: Pod, address and name.
    async fn wait_probes(&self, expected: &[(&str, &str, &str)]) -> NodePodProbe {
        let expected: Vec<[String; 3]> = expected
            .iter()
            .map(|(pod, ip, probe)| [pod, ip, probe].map(|text| (*text).to_owned()))
            .collect();
        let what: &'static str = format!("probes {expected:?}").leak();
        wait_until(&self.nodes, self.name, what, move |object| {
            let pods = object.spec.pod_probes.iter().flat_map(|pod| {
                let probes = pod.probes.iter();
                probes.map(|probe| [pod.name.clone(), pod.ip.clone(), probe.name.clone()])
            });
            let mut listed: Vec<[String; 3]> = pods.collect();
            listed.sort();
            listed == expected
        })
        .await
    }

    /// Reports results as the node's daemon: Pod, and its probes' names, states and messages.
    async fn report(&self, pods: &[(&Pod, Value)]) {
        let statuses = pods.iter().map(|(pod, states)| {
            json!({ "name": pod.name_any(), "namespace": self.name, "uid": pod.uid(), "probeStates": states })
        });
        let patch = Patch::Merge(json!({ "status": { "podProbeStatuses": statuses.collect::<Vec<_>>() } }));
        self.nodes
            .patch_status(self.name, &PatchParams::default(), &patch)
            .await
            .unwrap();
    }

    async fn wait_pod(
        &self,
        name: &str,
        what: &'static str,
        predicate: impl Fn(&Pod) -> bool + Send + 'static,
    ) -> Pod {
        wait_until(&self.pods, name, what, predicate).await
    }

    /// The manager's writes of the node's NodePodProbe.
    fn writes(&self) -> usize {
        let writes = shared_cluster().plane.audited_writes().unwrap();
        let ours = writes.iter().filter(|write| {
            let object = &write["objectRef"];
            write["user"]["username"] == "system:serviceaccount:kruise-system:kruise-manager"
                && object["resource"] == "nodepodprobes"
                && (object["name"] == self.name || write["requestObject"]["metadata"]["name"] == self.name)
        });
        ours.count()
    }
}

fn state(name: &str, state: &str, message: &str) -> Value {
    let now = "2026-01-02T00:00:00Z";
    json!({ "name": name, "state": state, "message": message, "lastProbeTime": now, "lastTransitionTime": now })
}

/// Status and message of a condition.
fn condition(pod: &Pod, type_: &str) -> Option<(String, String)> {
    let conditions = pod
        .status
        .clone()
        .unwrap_or_default()
        .conditions
        .unwrap_or_default();
    let found = conditions
        .into_iter()
        .find(|condition| condition.type_ == type_)?;
    Some((found.status, found.message.unwrap_or_default()))
}

fn has(pod: &Pod, type_: &str, status: &str) -> bool {
    condition(pod, type_).is_some_and(|(found, _)| found == status)
}

fn idle_probe(command: &str) -> Value {
    json!({ "name": "idle", "containerName": "app", "podConditionType": "game.io/idle",
        "probe": { "exec": { "command": [command] }, "periodSeconds": 5 }, "markerPolicy": [
            { "state": "Succeeded", "labels": { "idle": "yes" },
              "annotations": { "controller.kubernetes.io/pod-deletion-cost": "-10" } },
            { "state": "Failed", "labels": { "busy": "yes" } },
        ] })
}

fn gate_probe() -> Value {
    json!({ "name": "gate", "containerName": "app", "podConditionType": "game.io/gate",
        "probe": { "httpGet": { "path": "/", "port": "http" } } })
}

#[tokio::test]
async fn results_mark_the_selected_pods() {
    let test = ProbeFixture::new("probes-mark").await;
    let game = json!({ "app": "game" });
    let one = test.create_pod("one", "10.1.0.1", game.clone()).await;
    let other = test
        .create_pod("other", "10.1.0.2", json!({ "app": "other" }))
        .await;
    test.create_marker("m", game.clone(), json!([idle_probe("a"), gate_probe()]))
        .await;
    let object = test
        .wait_probes(&[("one", "10.1.0.1", "m#gate"), ("one", "10.1.0.1", "m#idle")])
        .await;
    let entry = &object.spec.pod_probes[0];
    assert_eq!(
        (&entry.uid, &entry.namespace),
        (&one.uid().unwrap(), &test.name.to_owned())
    );
    let http = entry
        .probes
        .iter()
        .find_map(|probe| probe.probe.http_get.clone())
        .unwrap();
    assert_eq!(json!(http.port), json!(8080), "the name of a port is resolved");

    test.report(&[
        (
            &one,
            json!([
                state("m#idle", "Succeeded", "no players"),
                state("m#gate", "Failed", "closed")
            ]),
        ),
        // A daemon may report other results than those of the spec.
        (
            &other,
            json!([state("m#idle", "Succeeded", ""), state("no-such", "Failed", "")]),
        ),
    ])
    .await;
    let pod = test.wait_pod("one", "marked", |pod| {
        has(pod, "game.io/idle", "True") && pod.labels().contains_key("idle")
    });
    let pod = pod.await;
    assert_eq!(
        condition(&pod, "game.io/idle"),
        Some(("True".to_owned(), "no players".to_owned()))
    );
    assert_eq!(
        condition(&pod, "game.io/gate"),
        Some(("False".to_owned(), "closed".to_owned()))
    );
    assert_eq!(
        pod.annotations()["controller.kubernetes.io/pod-deletion-cost"],
        "-10"
    );
    assert!(has(&pod, "Initialized", "True"), "kubelet's conditions stay");

    test.report(&[(
        &one,
        json!([
            state("m#idle", "Failed", "3 players"),
            state("m#gate", "Failed", "closed")
        ]),
    )])
    .await;
    let pod = test
        .wait_pod("one", "busy", |pod| pod.labels().contains_key("busy"))
        .await;
    assert!(
        !pod.labels().contains_key("idle") && pod.annotations().is_empty(),
        "{pod:?}"
    );
    assert!(has(&pod, "game.io/idle", "False"));

    // An edit of the policy applies to the present result.
    let mut probe = idle_probe("a");
    probe["markerPolicy"][1]["labels"] = json!({ "busy": "very" });
    let patch = Patch::Merge(json!({ "spec": { "probes": [probe, gate_probe()] } }));
    test.markers
        .patch("m", &PatchParams::default(), &patch)
        .await
        .unwrap();
    test.wait_pod("one", "the new label", |pod| {
        pod.labels().get("busy").is_some_and(|value| value == "very")
    })
    .await;

    let other = test.pods.get("other").await.unwrap();
    assert!(condition(&other, "game.io/idle").is_none() && !other.labels().contains_key("idle"));
    let marker = wait_until(&test.markers, "m", "status", |marker| marker.status.is_some()).await;
    assert_eq!(marker.status.unwrap().matched_pods, 1);
    // One to create it; edits of policies are not for the daemon.
    assert_eq!(test.writes(), 1);
}

#[tokio::test]
async fn probes_follow_pods_labels_and_addresses_and_leave_with_the_marker() {
    let test = ProbeFixture::new("probes-follow").await;
    let game = json!({ "app": "game" });
    test.create_pod("a", "10.2.0.1", game.clone()).await;
    let b = test.create_pod("b", "10.2.0.2", json!({ "app": "none" })).await;
    test.create_marker("way", game.clone(), json!([idle_probe("x"), gate_probe()]))
        .await;
    // The name of one is the end of the other.
    test.create_marker(
        "gateway",
        game.clone(),
        json!([{ "name": "idle", "containerName": "app",
        "podConditionType": "game.io/other", "probe": { "tcpSocket": { "port": 80 } } }]),
    )
    .await;
    let of = |pod: &'static str, ip: &'static str| {
        [
            (pod, ip, "gateway#idle"),
            (pod, ip, "way#gate"),
            (pod, ip, "way#idle"),
        ]
    };
    test.wait_probes(&of("a", "10.2.0.1")).await;
    let label = Patch::Merge(json!({ "metadata": { "labels": { "app": "game" } } }));
    test.pods
        .patch("b", &PatchParams::default(), &label)
        .await
        .unwrap();
    test.wait_probes(&[of("a", "10.2.0.1"), of("b", "10.2.0.2")].concat())
        .await;
    let status = json!({ "status": { "podIP": "10.2.0.9", "podIPs": [{ "$patch": "replace" }, { "ip": "10.2.0.9" }] } });
    test.pods
        .patch_status("a", &PatchParams::default(), &Patch::Strategic(status))
        .await
        .unwrap();
    test.wait_probes(&[of("a", "10.2.0.9"), of("b", "10.2.0.2")].concat())
        .await;
    test.pods
        .delete("a", &DeleteParams::default().grace_period(0))
        .await
        .unwrap();
    test.wait_probes(&of("b", "10.2.0.2")).await;

    let states = ["way#idle", "way#gate", "gateway#idle"].map(|name| state(name, "Succeeded", ""));
    test.report(&[(&b, json!(states))]).await;
    test.wait_pod("b", "marked", |pod| {
        has(pod, "game.io/other", "True") && pod.labels().contains_key("idle")
    })
    .await;
    test.markers
        .delete("way", &DeleteParams::default())
        .await
        .unwrap();
    test.wait_probes(&[("b", "10.2.0.2", "gateway#idle")]).await;
    wait_until_deleted(&test.markers, "way").await;
    let pod = test.pods.get("b").await.unwrap();
    assert!(
        !pod.labels().contains_key("idle") && pod.annotations().is_empty(),
        "{pod:?}"
    );
    assert!(condition(&pod, "game.io/idle").is_none(), "{pod:?}");
    assert!(has(&pod, "game.io/gate", "True"), "a readiness gate requires it");
    assert!(has(&pod, "game.io/other", "True"));
}

/// What OpenKruise accepts and what it forgets to check is refused by the API server, with field and reason.
#[tokio::test]
async fn invalid_markers_are_refused() {
    let test = ProbeFixture::new("probes-invalid").await;
    let valid = json!({ "name": "p", "containerName": "app", "podConditionType": "x/y",
        "probe": { "tcpSocket": { "port": 80 } } });
    let marker = |name: &str, selector: Value, probes: Value| {
        json!({ "apiVersion": "apps.kruise.io/v1alpha1", "kind": "PodProbeMarker",
            "metadata": { "name": name, "namespace": test.name }, "spec": { "selector": selector, "probes": probes } })
    };
    let with = |change: Value| {
        let mut probe = valid.clone();
        json_patch::merge(&mut probe, &change);
        json!([probe])
    };
    let game = json!({ "matchLabels": { "app": "game" } });
    let policy =
        |state: &str, labels: Value| json!({ "markerPolicy": [{ "state": state, "labels": labels }] });
    let cases = [
        (json!({}), json!([valid]), "spec.selector is empty"),
        (game.clone(), json!([]), "spec.probes"),
        (
            game.clone(),
            json!([valid, valid]),
            "two probes have the same name",
        ),
        (
            game.clone(),
            with(json!({ "name": "a#b" })),
            "spec.probes[0].name",
        ),
        (
            game.clone(),
            with(json!({ "containerName": "" })),
            "spec.probes[0].containerName",
        ),
        (
            game.clone(),
            with(json!({ "podConditionType": "Ready" })),
            "podConditionType is one of Kubernetes",
        ),
        (
            game.clone(),
            with(json!({ "podConditionType": "SidecarSetUpgradable" })),
            "podConditionType is one of Kubernetes",
        ),
        (
            game.clone(),
            with(json!({ "podConditionType": "a..b/c" })),
            "spec.probes[0].podConditionType",
        ),
        (
            game.clone(),
            with(policy("Failed", json!({ "a.-b/c": "1" }))),
            "a key is no valid key",
        ),
        (
            game.clone(),
            with(json!({ "podConditionType": "a b" })),
            "spec.probes[0].podConditionType",
        ),
        (
            game.clone(),
            with(json!({ "podConditionType": null })),
            "a probe needs a podConditionType or a markerPolicy",
        ),
        (
            game.clone(),
            with(json!({ "probe": { "exec": { "command": ["a"] } } })),
            "exactly one of exec, httpGet",
        ),
        (
            game.clone(),
            with(json!({ "probe": { "tcpSocket": null } })),
            "exactly one of exec, httpGet",
        ),
        (
            game.clone(),
            with(json!({ "probe": { "tcpSocket": null, "exec": {} } })),
            "exec has no command",
        ),
        (
            game.clone(),
            with(json!({ "probe": { "tcpSocket": { "host": "169.254.169.254" } } })),
            "tcpSocket.host",
        ),
        (
            game.clone(),
            with(json!({ "probe": { "tcpSocket": { "port": 0 } } })),
            "port must be a number from 1 to 65535",
        ),
        (
            game.clone(),
            with(json!({ "probe": { "periodSeconds": -1 } })),
            "periodSeconds",
        ),
        (
            game.clone(),
            with(policy("Unknown", json!({ "a": "b" }))),
            "markerPolicy[0].state",
        ),
        (
            game.clone(),
            with(policy("Failed", json!({}))),
            "neither labels nor annotations",
        ),
        (
            game.clone(),
            with(policy("Failed", json!({ "a b": "c" }))),
            "no valid key",
        ),
        (
            game.clone(),
            with(policy("Failed", json!({ "a": "b c" }))),
            "markerPolicy[0].labels.a",
        ),
    ];
    for (selector, probes, expected) in cases {
        let object = serde_json::from_value(marker("m", selector, probes.clone())).unwrap();
        let refused = test
            .markers
            .create(&kube::api::PostParams::default(), &object)
            .await;
        let message = refused.map(drop).unwrap_err().to_string();
        assert!(message.contains(expected), "{expected}: {message}");
    }
    test.create_marker("m", json!({ "app": "game" }), json!([valid]))
        .await;
    let patch = Patch::Merge(json!({ "spec": { "selector": { "matchLabels": { "app": "other" } } } }));
    let refused = test
        .markers
        .patch("m", &PatchParams::default(), &patch)
        .await
        .map(drop);
    let message = refused.unwrap_err().to_string();
    assert!(message.contains("spec.selector cannot be changed"), "{message}");
}
