//! Sidecars of Pods that run to completion: they end after the main containers, whatever their exit code.

use k8s_openapi::api::core::v1::{Event, Pod};
use kruise_api::container_recreate_request::ContainerRecreateRequest;
use kube::ResourceExt;
use kube::api::{ListParams, PostParams};
use serde_json::{Value, json};
use testbed::cluster::NODE_NAME;

use super::fixture::exclusive_cluster;
use super::with_manager::InstalledManager;

/// Runs until the file `NAME.done` exists.
fn main_container(name: &str, code: u8) -> Value {
    let script = format!("until [ -e /log/{name}.done ]; do sleep 0.2; done; exit {code}");
    json!({"name": "main", "image": "busybox:1.36", "command": ["sh", "-c", script]})
}

/// A sidecar that ends with this exit code when it is stopped.
fn sidecar(pod: &str, name: &str, code: u8, ignored: bool) -> Value {
    let script = format!(
        "trap 'exit {code}' TERM; touch /log/{pod}-{name}.up; while :; do sleep 3600 & wait $!; done"
    );
    let mut env = vec![json!({"name": "KRUISE_TERMINATE_SIDECAR_WHEN_JOB_EXIT", "value": "true"})];
    if ignored {
        env.push(json!({"name": "KRUISE_TERMINATE_SIDECAR_IGNORE_EXIT_CODE", "value": "true"}));
    }
    json!({"name": name, "image": "busybox:1.36", "command": ["sh", "-c", script], "env": env})
}

fn phase(pod: &Pod) -> &str {
    pod.status
        .as_ref()
        .and_then(|status| status.phase.as_deref())
        .unwrap_or_default()
}

/// Whether the manager has set the phase, in a way that kubelet takes note of at once.
fn is_marked(pod: &Pod) -> bool {
    let annotated = pod
        .annotations()
        .contains_key("apps.kruise.io/sidecars-terminated-at");
    let conditions = pod.status.iter().flat_map(|status| &status.conditions).flatten();
    let mut marks = conditions.filter(|condition| condition.type_ == "SidecarTerminated");
    let has_condition = marks.any(|condition| {
        condition.status == "True" && condition.message.as_deref() == Some("Terminated by Sidecar Terminator")
    });
    assert_eq!(annotated, has_condition, "{:?}", pod.metadata);
    annotated
}

fn all_ended(pod: &Pod) -> bool {
    let statuses = pod
        .status
        .iter()
        .flat_map(|status| &status.container_statuses)
        .flatten();
    let mut running =
        statuses.filter(|status| status.state.as_ref().is_some_and(|state| state.running.is_some()));
    running.next().is_none()
}

#[tokio::test]
async fn sidecars_end_after_the_main_containers() {
    let test = exclusive_cluster().await;
    let manager = InstalledManager::start(&test.cluster.node);
    // Name, policy, exit code of the main container, sidecars; phase, whether the manager sets it.
    let cases = [
        ("never", "Never", 0, vec![("log", 0, false)], "Succeeded", false),
        (
            "never-fails",
            "Never",
            3,
            vec![("log", 0, false)],
            "Failed",
            false,
        ),
        // As in OpenKruise, the exit code of a sidecar counts unless it is to be ignored.
        ("counted", "Never", 0, vec![("log", 9, false)], "Failed", false),
        ("ignored", "Never", 0, vec![("log", 9, true)], "Succeeded", true),
        (
            "both",
            "Never",
            0,
            vec![("log", 0, false), ("mesh", 9, true)],
            "Succeeded",
            true,
        ),
        (
            "on-failure",
            "OnFailure",
            0,
            vec![("log", 0, false)],
            "Succeeded",
            false,
        ),
        // Kubelet would start the sidecar again and again.
        (
            "restarted",
            "OnFailure",
            0,
            vec![("log", 9, false)],
            "Succeeded",
            true,
        ),
    ];
    for (name, policy, code, sidecars, ..) in &cases {
        let mut containers = vec![main_container(name, *code)];
        containers.extend(
            sidecars
                .iter()
                .map(|(sidecar_name, code, ignored)| sidecar(name, sidecar_name, *code, *ignored)),
        );
        let spec = json!({"restartPolicy": policy, "terminationGracePeriodSeconds": 60});
        test.create_pod(name, json!(containers), spec).await;
        for (sidecar_name, ..) in sidecars {
            test.wait_for_file(&format!("{name}-{sidecar_name}.up")).await;
        }
    }
    let requests = test.api::<ContainerRecreateRequest>();
    let none = requests.list(&ListParams::default()).await.unwrap();
    assert_eq!(none.items.len(), 0, "no main container has ended");
    for (name, ..) in &cases {
        test.write_file(&format!("{name}.done"));
    }
    for (name, _, _, sidecars, expected, marked) in &cases {
        let ended = |pod: &Pod| ["Succeeded", "Failed"].contains(&phase(pod)) && all_ended(pod);
        let (pod, _) = test
            .watch_until::<Pod>(name, "the Pod and all containers have ended", ended)
            .await;
        assert_eq!(
            (phase(&pod), is_marked(&pod)),
            (*expected, *marked),
            "{name}: {:#?}",
            pod.status
        );
        // Kubelet stops those whose exit code is ignored.
        let (ignored, counted): (Vec<&(&str, u8, bool)>, Vec<_>) =
            sidecars.iter().partition(|(_, _, ignored)| *ignored);
        // The request is the Pod's own, and ends.
        let uid = pod.uid().unwrap();
        test.poll_until("the requests of the Pod end", || async {
            let all = requests.list(&ListParams::default()).await.unwrap();
            let own: Vec<_> = all
                .items
                .into_iter()
                .filter(|one| one.spec.pod_name == *name)
                .collect();
            assert_eq!(own.len(), counted.len(), "{name}: {own:#?}");
            for request in &own {
                assert_eq!(request.name_any(), format!("sidecar-termination-{uid}"));
                assert_eq!(request.owner_references()[0].uid, uid);
                let stopped = request
                    .spec
                    .containers
                    .iter()
                    .all(|one| counted.iter().any(|(name, ..)| *name == one.name));
                assert!(stopped, "{name}: {:#?}", request.spec);
            }
            let all_completed = own.iter().all(|one| {
                one.status
                    .as_ref()
                    .is_some_and(|status| status.completion_time.is_some())
            });
            all_completed.then_some(())
        })
        .await;
        let stops = counted.iter().map(|(name, ..)| {
            format!("Kruise SidecarTerminator is trying to terminate sidecar [{name}] using crr")
        });
        let sets_phase = ignored.iter().map(|(name, ..)| {
            format!("Kruise SidecarTerminator has set phase Succeeded, kubelet stops sidecar [{name}]")
        });
        let expected: Vec<String> = stops.chain(sets_phase).collect();
        test.poll_until("the events", || async {
            let events = test.api::<Event>().list(&ListParams::default()).await.unwrap();
            let of_pod = events.items.iter().filter(|event| {
                event.involved_object.uid.as_ref() == Some(&uid)
                    && event.reason.as_deref() == Some("SidecarTerminator")
            });
            let messages: Vec<_> = of_pod.filter_map(|event| event.message.as_ref()).collect();
            expected.iter().all(|one| messages.contains(&one)).then_some(())
        })
        .await;
    }
    drop(manager);
}

#[tokio::test]
async fn sidecar_that_never_started_does_not_keep_its_pod() {
    let test = exclusive_cluster().await;
    let manager = InstalledManager::start(&test.cluster.node);
    let mut missing = sidecar("p", "log", 0, false);
    missing["image"] = json!("there.is.no.such.registry.invalid/image:1");
    let main = json!({"name": "main", "image": "busybox:1.36", "imagePullPolicy": "IfNotPresent", "command": ["true"]});
    for policy in ["Never", "OnFailure"] {
        let name = format!("missing-{}", policy.to_lowercase());
        let pod = json!({"metadata": {"name": name, "namespace": test.namespace}, "spec": {"nodeName": NODE_NAME,
            "restartPolicy": policy, "containers": [main, missing]}});
        let pod: Pod = serde_json::from_value(pod).unwrap();
        test.api::<Pod>()
            .create(&PostParams::default(), &pod)
            .await
            .unwrap();
        let ended = |pod: &Pod| ["Succeeded", "Failed"].contains(&phase(pod));
        let (pod, _) = test.watch_until::<Pod>(&name, "the Pod has ended", ended).await;
        assert_eq!(
            (phase(&pod), is_marked(&pod)),
            ("Succeeded", true),
            "{name}: {:#?}",
            pod.status
        );
    }
    drop(manager);
}
