//! CloneSet on the real API server: what is refused and filled in without any webhook, how it is scaled,
//! converted and protected.

use kruise::api::keys;
use kube::api::{Api, DeleteParams, DynamicObject, Patch, PatchParams};
use serde_json::{Value, json};

use crate::world::{create, get, merge, merge_status, refused, typed, world};

const ALPHA: &str = "apps.kruise.io/v1alpha1";
const BETA: &str = "apps.kruise.io/v1beta1";

/// A good CloneSet in either version, with `change` merged into its spec.
pub fn set(version: &str, name: &str, change: Value) -> Value {
    let mut set = json!({
        "apiVersion": version, "kind": "CloneSet", "metadata": { "name": name },
        "spec": {
            "selector": { "matchLabels": { "app": "a" } },
            "template": {
                "metadata": { "labels": { "app": "a" } },
                "spec": { "containers": [{ "name": "c", "image": "i:1" }] },
            },
        },
    });
    json_patch::merge(&mut set["spec"], &change);
    set
}

pub async fn sets(version: &str) -> Api<DynamicObject> {
    typed(&world().admin().await, version, "CloneSet", Some("default"))
}

/// Mistakes in what stands in the same place in both versions.
fn mistakes() -> Vec<(Value, &'static str)> {
    vec![
        (json!({ "replicas": -1 }), "spec.replicas: Invalid value: -1"),
        (
            json!({ "revisionHistoryLimit": -1 }),
            "spec.revisionHistoryLimit: Invalid value: -1",
        ),
        (
            json!({ "minReadySeconds": -1 }),
            "spec.minReadySeconds: Invalid value: -1",
        ),
        (
            json!({ "minReadySeconds": 9, "progressDeadlineSeconds": 9 }),
            "spec.progressDeadlineSeconds is 9, which is not more than spec.minReadySeconds, which is 9",
        ),
        (json!({ "selector": null }), "spec.selector: Required value"),
        (
            json!({ "selector": { "matchLabels": null } }),
            "an empty selector matches every Pod",
        ),
        (json!({ "template": null }), "spec.template: Required value"),
        (
            json!({ "template": { "spec": { "restartPolicy": "Never" } } }),
            "spec.template.spec.restartPolicy: Unsupported value: \"Never\"",
        ),
        (
            json!({ "template": { "spec": { "activeDeadlineSeconds": 9 } } }),
            "activeDeadlineSeconds would end Pods",
        ),
        (
            json!({ "scaleStrategy": { "podsToDelete": ["a", "a"] } }),
            "spec.scaleStrategy.podsToDelete[1]: Duplicate value: \"a\"",
        ),
        (
            json!({ "scaleStrategy": { "maxUnavailable": "20" } }),
            "it is 20; give a number of Pods, 0 or greater, or a percentage such as 20%",
        ),
    ]
}

/// Mistakes in fields that only v1beta1 has: v1alpha1 says them in annotations, which are no part of the schema.
fn mistakes_in_pre_download() -> Vec<(Value, &'static str)> {
    vec![
        (
            json!({ "inPlaceUpdateStrategy": { "imagePreDownloadParallelism": "10%" } }),
            "it is 10%; give a number of nodes",
        ),
        (
            json!({ "inPlaceUpdateStrategy": { "imagePreDownloadTimeoutSeconds": -1 } }),
            "imagePreDownloadTimeoutSeconds: Invalid value: -1",
        ),
    ]
}

/// Mistakes in the order of an update.
fn mistakes_in_order() -> Vec<(Value, &'static str)> {
    vec![
        (
            json!({ "priorityStrategy": {
                "orderPriority": [{ "orderedKey": "a" }],
                "weightPriority": [{ "weight": 1, "matchSelector": { "matchLabels": { "a": "b" } } }],
            } }),
            "orderPriority and weightPriority exclude each other",
        ),
        (
            json!({ "priorityStrategy": { "weightPriority": [{ "weight": 101, "matchSelector": { "matchLabels": { "a": "b" } } }] } }),
            "weightPriority[0].weight: Invalid value: 101",
        ),
        (
            json!({ "priorityStrategy": { "weightPriority": [{ "weight": 1, "matchSelector": {} }] } }),
            "an empty selector matches every Pod",
        ),
        (
            json!({ "priorityStrategy": { "orderPriority": [{ "orderedKey": "" }] } }),
            "orderPriority[0].orderedKey: Invalid value: \"\"",
        ),
        (
            json!({ "scatterStrategy": [{ "key": "a", "value": "b" }, { "key": "a", "value": "b" }] }),
            "scatterStrategy[1]: Duplicate value",
        ),
        (
            json!({ "scatterStrategy": [{ "key": "", "value": "b" }] }),
            "scatterStrategy[0].key: Invalid value: \"\"",
        ),
    ]
}

/// Lists that are one longer than they may be.
fn too_many_terms() -> Vec<(Value, &'static str)> {
    let terms = |term: fn(usize) -> Value| (0..257).map(term).collect::<Value>();
    vec![
        (
            json!({ "priorityStrategy": { "orderPriority": terms(|at| json!({ "orderedKey": format!("k{at}") })) } }),
            "priorityStrategy.orderPriority: Too many: 257: must have at most 256 items",
        ),
        (
            json!({ "priorityStrategy": { "weightPriority": terms(|at| {
                json!({ "weight": 1, "matchSelector": { "matchLabels": { "a": at.to_string() } } })
            }) } }),
            "priorityStrategy.weightPriority: Too many: 257: must have at most 256 items",
        ),
        (
            json!({ "scatterStrategy": terms(|at| json!({ "key": "a", "value": at.to_string() })) }),
            "scatterStrategy: Too many: 257: must have at most 256 items",
        ),
    ]
}

/// Mistakes in the limits of an update, which stand in different places.
fn mistakes_in_limits() -> Vec<(Value, &'static str)> {
    vec![
        (json!({ "partition": -1 }), "it is -1; give a number of Pods"),
        (
            json!({ "partition": "half" }),
            "it is half; give a number of Pods",
        ),
        (
            json!({ "maxUnavailable": "12.5%" }),
            "it is 12.5%; give a number of Pods",
        ),
        (json!({ "maxSurge": "3" }), "it is 3; give a number of Pods"),
        (
            json!({ "maxUnavailable": 0 }),
            "maxUnavailable and maxSurge are both 0",
        ),
        (
            json!({ "maxUnavailable": "0%", "maxSurge": "0%" }),
            "maxUnavailable and maxSurge are both 0",
        ),
        (
            json!({ "inPlaceUpdateStrategy": { "gracePeriodSeconds": -1 } }),
            "gracePeriodSeconds: Invalid value: -1",
        ),
    ]
}

/// Limits of an update, where the version has them.
pub fn update(version: &str, limits: Value) -> Value {
    if version == BETA {
        json!({ "updateStrategy": { "rollingUpdate": limits } })
    } else {
        json!({ "updateStrategy": limits })
    }
}

#[tokio::test]
async fn clonesets_with_mistakes_are_refused_in_words() {
    for version in [BETA, ALPHA] {
        let sets = sets(version).await;
        let more = if version == BETA {
            mistakes_in_pre_download()
        } else {
            Vec::new()
        };
        let limits = mistakes_in_limits()
            .into_iter()
            .chain(mistakes_in_order())
            .chain(too_many_terms())
            .chain(more)
            .map(|(limits, message)| (update(version, limits), message));
        let policy = if version == BETA {
            "podUpdatePolicy"
        } else {
            "type"
        };
        let words = [
            (
                update(version, json!({ policy: "InPlace" })),
                "Unsupported value: \"InPlace\"",
            ),
            (
                update(version, json!({ policy: "InPlaceOnly", "maxSurge": 1 })),
                "InPlaceOnly keeps every Pod, so there is nothing to surge with",
            ),
            (
                json!({ "updateStrategy": { "type": "Sometimes" } }),
                "Unsupported value: \"Sometimes\"",
            ),
        ];
        for (change, message) in mistakes().into_iter().chain(limits).chain(words) {
            refused(create(&sets, set(version, "mistaken", change)).await, message);
        }
    }
}

#[tokio::test]
async fn a_deadline_that_stands_for_none_is_taken_whatever_is_asked_of_pods() {
    let none = json!({ "minReadySeconds": i32::MAX, "progressDeadlineSeconds": i32::MAX });
    for (version, name) in [(BETA, "no-deadline-beta"), (ALPHA, "no-deadline-alpha")] {
        let made = create(&sets(version).await, set(version, name, none.clone())).await;
        assert_eq!(made.unwrap()["spec"]["progressDeadlineSeconds"], i32::MAX);
    }
}

#[tokio::test]
async fn what_is_absent_is_filled_in() {
    let (alpha, beta) = (sets(ALPHA).await, sets(BETA).await);
    let made = create(&beta, set(BETA, "filled-in", json!({}))).await.unwrap();
    let spec = &made["spec"];
    assert_eq!(
        (
            &spec["replicas"],
            &spec["revisionHistoryLimit"],
            &spec["minReadySeconds"]
        ),
        (&json!(1), &json!(10), &json!(0))
    );
    assert_eq!(
        spec["updateStrategy"],
        json!({
            "type": "RollingUpdate",
            "rollingUpdate": { "podUpdatePolicy": "ReCreate", "partition": 0, "maxUnavailable": "20%", "maxSurge": 0 },
        })
    );
    let old = json!({ "type": "ReCreate", "partition": 0, "maxUnavailable": "20%", "maxSurge": 0 });
    assert_eq!(get(&alpha, "filled-in").await["spec"]["updateStrategy"], old);
    let made = create(&alpha, set(ALPHA, "filled-in-old", json!({})))
        .await
        .unwrap();
    assert_eq!(made["spec"]["updateStrategy"], old);
}

#[tokio::test]
async fn good_limits_pass_and_the_selector_stays() {
    let sets = sets(BETA).await;
    for (at, limits) in [
        json!({ "maxUnavailable": 0, "maxSurge": "1%" }),
        json!({ "partition": "12.5%", "maxUnavailable": "100%" }),
        json!({ "partition": 5000, "podUpdatePolicy": "InPlaceOnly", "maxSurge": "0%" }),
        json!({ "inPlaceUpdateStrategy": { "imagePreDownloadParallelism": "10" } }),
    ]
    .into_iter()
    .enumerate()
    {
        create(&sets, set(BETA, &format!("good-{at}"), update(BETA, limits)))
            .await
            .unwrap();
    }
    let idle = json!({ "replicas": 0, "updateStrategy": { "rollingUpdate": { "maxUnavailable": 0 } } });
    create(&sets, set(BETA, "idle", idle)).await.unwrap();
    refused(
        merge(&sets, "idle", json!({ "spec": { "replicas": 1 } })).await,
        "maxUnavailable and maxSurge are both 0",
    );
    let on_delete = json!({ "updateStrategy": { "type": "OnDelete" } });
    create(&sets, set(BETA, "on-delete", on_delete)).await.unwrap();
    let change = json!({ "spec": {
        "selector": { "matchLabels": { "b": "c" } },
        "template": { "metadata": { "labels": { "b": "c" } } },
    } });
    refused(
        merge(&sets, "good-0", change).await,
        "spec.selector cannot be changed",
    );
}

#[tokio::test]
async fn it_scales_like_any_other_workload() {
    let sets = sets(BETA).await;
    create(&sets, set(BETA, "scaled", json!({}))).await.unwrap();
    let counts = json!({ "replicas": 1, "readyReplicas": 0, "availableReplicas": 0, "updatedReplicas": 1,
        "updatedReadyReplicas": 0, "labelSelector": "app=a" });
    merge_status(&sets, "scaled", json!({ "status": counts }))
        .await
        .unwrap();
    let plane = &world().plane;
    plane.kubectl(&["scale", "clone/scaled", "--replicas=7"]).unwrap();
    let scale = sets.get_scale("scaled").await.unwrap();
    let status = scale.status.unwrap();
    assert_eq!((scale.spec.unwrap().replicas, status.replicas), (Some(7), 1));
    assert_eq!(status.selector.as_deref(), Some("app=a"));
    let old = plane
        .kubectl(&["get", "clonesets.v1alpha1.apps.kruise.io/scaled", "-o=wide"])
        .unwrap();
    for column in ["DESIRED", "UPDATED_AVAILABLE", "IMAGES", "i:1", "app=a"] {
        assert!(old.contains(column), "{column} is not in {old}");
    }
    let negative = json!({ "spec": { "replicas": -1 } });
    let negative = sets
        .patch_scale("scaled", &PatchParams::default(), &Patch::Merge(negative))
        .await;
    assert!(negative.unwrap_err().to_string().contains("non-negative"));
}

/// A user of v1alpha1 and one of v1beta1 take turns.
#[tokio::test]
async fn both_versions_say_the_same() {
    let (alpha, beta) = (sets(ALPHA).await, sets(BETA).await);
    let mut object = set(
        ALPHA,
        "both",
        json!({
            "scaleStrategy": { "disablePVCReuse": true },
            "updateStrategy": { "type": "InPlaceIfPossible", "partition": "50%", "inPlaceUpdateStrategy": { "gracePeriodSeconds": 9 } },
        }),
    );
    object["metadata"]["annotations"] = json!({ "apps.kruise.io/image-predownload-parallelism": "3" });
    object["metadata"]["labels"] =
        json!({ "apps.kruise.io/cloneset-scaling-exclude-preparing-delete": "true" });
    create(&alpha, object).await.unwrap();
    let spec = get(&beta, "both").await["spec"].clone();
    assert_eq!(
        spec["scaleStrategy"],
        json!({ "enablePVCReuse": false, "excludePreparingDelete": true })
    );
    let rolling = &spec["updateStrategy"]["rollingUpdate"];
    assert_eq!(rolling["podUpdatePolicy"], "InPlaceIfPossible");
    assert_eq!(
        rolling["inPlaceUpdateStrategy"],
        json!({ "gracePeriodSeconds": 9, "imagePreDownloadParallelism": 3 })
    );
    let change = json!({ "spec": {
        "scaleStrategy": { "excludePreparingDelete": false },
        "updateStrategy": { "rollingUpdate": { "inPlaceUpdateStrategy": { "imagePreDownloadParallelism": 5 } } },
    } });
    merge(&beta, "both", change).await.unwrap();
    let old = merge(&alpha, "both", json!({ "spec": { "replicas": 4 } }))
        .await
        .unwrap();
    assert_eq!(old["metadata"]["labels"], Value::Null);
    assert_eq!(
        old["metadata"]["annotations"]["apps.kruise.io/image-predownload-parallelism"],
        "5"
    );
    let on_delete = json!({ "spec": { "updateStrategy": { "type": "OnDelete", "partition": 2 } } });
    merge(&alpha, "both", on_delete).await.unwrap();
    let old = get(&alpha, "both").await;
    assert_eq!(old["spec"]["updateStrategy"]["partition"], 2);
    assert_eq!(
        old["metadata"]["annotations"].get(keys::CLONESET_POD_UPDATE_POLICY),
        None
    );
    assert_eq!(
        get(&beta, "both").await["spec"]["updateStrategy"]["rollingUpdate"]["partition"],
        2
    );
}

#[tokio::test]
async fn what_is_protected_stays() {
    let sets = sets(BETA).await;
    let label =
        |value: &str| json!({ "metadata": { "labels": { "policy.kruise.io/delete-protection": value } } });
    let delete = async || match sets.delete("protected", &DeleteParams::default()).await {
        Ok(_) => Ok(Value::Null),
        Err(why) => Err(why.to_string()),
    };
    create(&sets, set(BETA, "protected", json!({}))).await.unwrap();
    merge(&sets, "protected", label("Always")).await.unwrap();
    refused(delete().await, "policy.kruise.io/delete-protection");
    merge(&sets, "protected", label("Cascading")).await.unwrap();
    refused(delete().await, "scale CloneSet protected to 0");
    merge(&sets, "protected", json!({ "spec": { "replicas": 0 } }))
        .await
        .unwrap();
    delete().await.unwrap();
    create(&sets, set(BETA, "protected", json!({}))).await.unwrap();
    merge(&sets, "protected", label("other")).await.unwrap();
    delete().await.unwrap();
}
