use std::collections::BTreeMap;

use kruise_api::keys;
use kruise_api::sidecarset::SidecarSetSpec;
use proptest::prelude::*;
use serde_json::{Value, json};

use crate::in_place::Pod;
use crate::sidecarset::changed_field::{ChangedField, changed_field};
use crate::sidecarset::json_merge::MergeError;
use crate::sidecarset::plan::Wait;
use crate::sidecarset::pod_metadata::PatchError;
use crate::sidecarset::set::SetView;
use crate::sidecarset::waiting::{
    MAX_MESSAGE_CHARS, Waiting, WaitingRollout, condition, first_not_upgradable,
};

const HOT: &str = "HotUpgrade";

fn set_spec(strategy: &Value, upgrade_type: &str) -> SidecarSetSpec {
    let upgrade = json!({ "upgradeType": upgrade_type, "hotUpgradeEmptyImage": "empty:1" });
    let container = json!({ "name": "log", "image": "log:2", "upgradeStrategy": upgrade });
    serde_json::from_value(json!({ "containers": [container], "updateStrategy": strategy })).unwrap()
}

/// A Pod that is ready, with a change of its status.
fn pod(at: usize, log: &Value) -> Pod {
    let ready = log["ready"] == true;
    Pod::from_json(&json!({
        "metadata": { "name": format!("web-{at}"), "annotations": {
            keys::SIDECAR_SET_IN_PLACE_UPDATE_STATE:
                r#"{"s":{"lastContainerStatuses":{"log":{"imageID":"id1"}}}}"#,
        } },
        "spec": { "nodeName": "n1", "containers": [{ "name": "log", "image": "log:2" }] },
        "status": {
            "phase": "Running",
            "conditions": [{ "type": "Ready", "status": if ready { "True" } else { "False" } }],
            "containerStatuses": [log],
        },
    }))
}

fn ready() -> Value {
    json!({ "name": "log", "image": "log:2", "imageID": "id2", "ready": true, "state": { "running": {} } })
}

/// Its container still runs the old image.
fn stale() -> Value {
    json!({ "name": "log", "image": "log:1", "imageID": "id1", "ready": true, "state": { "running": {} } })
}

fn crashing(exit_code: i32) -> Value {
    json!({ "name": "log", "image": "log:2", "imageID": "id2", "ready": false,
        "state": { "waiting": { "reason": "CrashLoopBackOff" } },
        "lastState": { "terminated": { "exitCode": exit_code } } })
}

fn waiting(spec: &SidecarSetSpec, pods: &[Pod], waits: &[Wait], changed: Option<&ChangedField>) -> Waiting {
    let pods: Vec<&Pod> = pods.iter().collect();
    let set = SetView {
        name: "s",
        resource_version: "1",
        annotations: &BTreeMap::new(),
        latest_revision: "s-1",
        spec,
    };
    let waiting = condition(&WaitingRollout {
        set,
        pods: &pods,
        namespaces: &vec!["default"; pods.len()],
        waits,
        changed_field: changed,
    });
    waiting.unwrap()
}

fn reason_and_message(strategy: &Value, pods: &[Pod], waits: &[Wait]) -> (&'static str, String) {
    let Waiting { reason, message } = waiting(&set_spec(strategy, "ColdUpgrade"), pods, waits, None);
    (reason, message)
}

#[test]
fn limit_comes_with_the_pods_that_use_it_up() {
    let pods = [
        pod(0, &ready()),
        pod(1, &crashing(137)),
        pod(2, &ready()),
        pod(3, &ready()),
    ];
    let held = Wait::MaxUnavailable {
        held: vec![2, 3],
        unavailable: 1,
        limit: 1,
    };
    let waits = [held, Wait::UpdatedNotReady(vec![1])];
    let updated = "1 of 4 Pods is updated, but not ready: \
        default/web-1 (container log: CrashLoopBackOff (exit code 137))";
    for (strategy, limit) in [
        (json!({}), "1"),
        (json!({ "maxUnavailable": 1 }), "1"),
        (json!({ "maxUnavailable": "25%" }), "25%, 1 of 4 Pods"),
    ] {
        let (reason, message) = reason_and_message(&strategy, &pods, &waits);
        assert_eq!(reason, "MaxUnavailable");
        let held =
            format!("2 of 4 Pods wait: 1 Pod is unavailable or being updated, and maxUnavailable is {limit}");
        assert_eq!(message, format!("{held}; {updated}"));
    }
}

#[test]
fn limit_of_zero_is_to_be_changed() {
    let held = Wait::MaxUnavailable {
        held: vec![0],
        unavailable: 0,
        limit: 0,
    };
    let (_, message) = reason_and_message(&json!({ "maxUnavailable": "0%" }), &[pod(0, &ready())], &[held]);
    let expected = "1 of 1 Pods waits until maxUnavailable is more than 0: it is 0%, 0 of 1 Pods, so that no ready Pod may be updated";
    assert_eq!(message, expected);
}

#[test]
fn message_holds_pauses_and_partitions() {
    let pods = [pod(0, &ready()), pod(1, &ready())];
    for (strategy, wait, reason, message) in [
        (
            json!({ "type": "NotUpdate" }),
            Wait::NotUpdate { outdated: vec![0, 1] },
            "NotUpdate",
            "2 of 2 Pods are not updated, because spec.updateStrategy.type is NotUpdate",
        ),
        (
            json!({ "paused": true }),
            Wait::Paused { outdated: vec![0] },
            "Paused",
            "1 of 2 Pods is not updated, because spec.updateStrategy.paused is true",
        ),
        (
            json!({ "partition": "50%" }),
            Wait::Partition(vec![0]),
            "Partition",
            "1 of 2 Pods keeps the old containers, as partition 50% asks",
        ),
        (
            json!({ "selector": {} }),
            Wait::NotSelected(vec![0, 1]),
            "NotSelected",
            "2 of 2 Pods keep the old containers, because spec.updateStrategy.selector leaves them out",
        ),
    ] {
        assert_eq!(
            reason_and_message(&strategy, &pods, &[wait]),
            (reason, message.to_owned())
        );
    }
}

#[test]
fn change_that_cannot_be_made_in_place_is_named() {
    let spec = set_spec(&json!({}), "");
    let old = json!({ "spec": { "containers": [{ "name": "log", "env": [{ "name": "LEVEL" }] }] } });
    let changed = changed_field(&old, &set_spec(&json!(null), "")).unwrap();
    let pods: Vec<Pod> = (0..5).map(|at| pod(at, &ready())).collect();
    let waits = [Wait::NotUpgradable(vec![0, 1, 2, 4])];
    assert_eq!(first_not_upgradable(&waits), Some(0));
    assert_eq!(
        waiting(&spec, &pods, &waits, Some(&changed)),
        Waiting {
            reason: "NotUpgradable",
            message:
                "4 of 5 Pods keep the old containers until they are recreated, because of a change that \
                cannot be made in place (containers[log].env is removed): default/web-0, default/web-1, \
                default/web-2 and 1 more"
                    .to_owned(),
        }
    );
    assert_eq!(
        waiting(&spec, &pods, &[Wait::NotUpgradable(vec![4])], None).message,
        "1 of 5 Pods keeps the old containers until it is recreated, because of a change that cannot be made in \
            place (more than images differs): default/web-4"
    );
}

#[test]
fn kubelet_is_named_with_its_node() {
    let pods = [pod(0, &stale()), pod(1, &crashing(1))];
    assert_eq!(
        reason_and_message(&json!({}), &pods, &[Wait::PreviousUpdate(vec![0])]),
        (
            "PreviousUpdate",
            "1 of 2 Pods waits for the end of the previous update: \
                default/web-0 (kubelet of Node n1 has not replaced container log)"
                .to_owned()
        )
    );
    let (reason, message) = reason_and_message(&json!({}), &pods, &[Wait::UpdatedNotReady(vec![0, 1])]);
    assert_eq!(reason, "PodsNotReady");
    assert_eq!(
        message,
        "2 of 2 Pods are updated, but not ready: default/web-1 (container log: CrashLoopBackOff (exit code 1)), \
            default/web-0 (kubelet of Node n1 has not replaced container log)"
    );
}

#[test]
fn most_frequent_reason_comes_first_and_others_are_counted() {
    let pods: Vec<Pod> = (0..12)
        .map(|at| pod(at, &crashing(i32::try_from(at).unwrap().min(7))))
        .collect();
    let (_, message) = reason_and_message(&json!({}), &pods, &[Wait::UpdatedNotReady((0..12).collect())]);
    assert_eq!(
        message,
        "12 of 12 Pods are updated, but not ready: \
            default/web-7, default/web-8, default/web-9 and 2 more (container log: CrashLoopBackOff (exit code 7)), \
            default/web-0 (container log: CrashLoopBackOff (exit code 0)), \
            default/web-1 (container log: CrashLoopBackOff (exit code 1)), \
            default/web-2 (container log: CrashLoopBackOff (exit code 2)) and 4 more for other reasons"
    );
}

#[test]
fn annotation_that_is_no_json_is_named() {
    let why = PatchError {
        key: "example.com/ports".to_owned(),
        why: MergeError::Document,
    };
    assert_eq!(
        reason_and_message(
            &json!({}),
            &[pod(0, &ready())],
            &[Wait::InvalidAnnotation(vec![(0, why)])]
        ),
        (
            "InvalidAnnotation",
            "1 of 1 Pods cannot be updated until annotation or patch is corrected: default/web-0 \
                (patchPodMetadata of annotation \"example.com/ports\": invalid JSON document)"
                .to_owned()
        )
    );
}

#[test]
fn hot_upgrade_names_the_container_that_takes_over() {
    let status =
        |name: &str, ready: bool| json!({ "name": name, "ready": ready, "state": { "running": {} } });
    let pod = Pod::from_json(&json!({
        "metadata": { "name": "web-0", "annotations": {
            keys::SIDECAR_SET_WORKING_CONTAINER: r#"{"log":"log-2"}"# } },
        "spec": { "containers": [{ "name": "log-1", "image": "log:1" }, { "name": "log-2", "image": "log:2" }] },
        "status": { "phase": "Running", "containerStatuses": [status("log-1", true), status("log-2", false)] },
    }));
    let spec = set_spec(&json!({}), HOT);
    assert_eq!(
        waiting(&spec, &[pod], &[Wait::HotUpgrade(vec![0])], None).message,
        "1 of 1 Pods waits for the containers that take over: default/web-0 (container log-2: it runs, but is not ready)"
    );
}

fn any_waits() -> impl Strategy<Value = Vec<Wait>> {
    let pods = || prop::collection::vec(0_usize..60, 0..50);
    let wait = prop_oneof![
        pods().prop_map(|outdated| Wait::Paused { outdated }),
        pods().prop_map(|outdated| Wait::NotUpdate { outdated }),
        pods().prop_map(Wait::NotUpgradable),
        pods().prop_map(Wait::HotUpgrade),
        pods().prop_map(Wait::PreviousUpdate),
        pods().prop_map(Wait::UpdatedNotReady),
        pods().prop_map(Wait::Partition),
        (pods(), any::<usize>(), any::<usize>()).prop_map(|(held, unavailable, limit)| {
            Wait::MaxUnavailable {
                held,
                unavailable,
                limit,
            }
        }),
    ];
    prop::collection::vec(wait, 1..12)
}

proptest! {
    /// However many Pods wait, with texts of any length, the message has its limit, and the reason is the first wait's.
    #[test]
    fn message_is_bounded(waits in any_waits(), length in 0_usize..2000, hot: bool) {
        let text = "é".repeat(length);
        let strategy = json!({ "maxUnavailable": text, "partition": text });
        let pods: Vec<Pod> = (0..50)
            .map(|at| {
                let mut pod = pod(at, &crashing(1));
                pod.name += &text;
                pod.node = Some(format!("{at}{text}"));
                pod.container_statuses[0].waiting = Some(format!("{at}{text}"));
                pod
            })
            .collect();
        let spec = set_spec(&strategy, if hot { HOT } else { "" });
        let all = waiting(&spec, &pods, &waits, None);
        prop_assert!(all.message.chars().count() <= MAX_MESSAGE_CHARS);
        prop_assert!(!all.message.is_empty());
        let first = waits.get(..1).unwrap();
        prop_assert_eq!(all.reason, waiting(&spec, &pods, first, None).reason);
    }
}
