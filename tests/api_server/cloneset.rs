//! CloneSet on the real API server: validation, defaults, scaling, conversion and protection.

use kruise_api::keys;
use kube::api::{Api, DeleteParams, DynamicObject, Patch, PatchParams};
use serde_json::{Value, json};

use crate::cloneset_invalid as mistakes;
use crate::webhook_cluster::{assert_denied, create, dynamic_api, get, merge, merge_status, shared_cluster};

pub const ALPHA: &str = "apps.kruise.io/v1alpha1";
pub const BETA: &str = "apps.kruise.io/v1beta1";

/// A valid CloneSet in either version, with `change` merged into its spec.
pub fn cloneset(version: &str, name: &str, change: Value) -> Value {
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

pub async fn cloneset_api(version: &str) -> Api<DynamicObject> {
    dynamic_api(
        &shared_cluster().admin().await,
        version,
        "CloneSet",
        Some("default"),
    )
}

/// Limits of an update, in the place where the version has them.
pub fn update_strategy(version: &str, limits: Value) -> Value {
    if version == BETA {
        json!({ "updateStrategy": { "rollingUpdate": limits } })
    } else {
        json!({ "updateStrategy": limits })
    }
}

#[tokio::test]
async fn invalid_clonesets_are_rejected_with_a_message() {
    for version in [BETA, ALPHA] {
        let sets = cloneset_api(version).await;
        for (change, message) in mistakes::invalid_specs(version) {
            assert_denied(
                create(&sets, cloneset(version, "mistaken", change)).await,
                message,
            );
        }
    }
}

#[tokio::test]
async fn maximal_progress_deadline_means_no_deadline() {
    let none = json!({ "minReadySeconds": i32::MAX, "progressDeadlineSeconds": i32::MAX });
    for (version, name) in [(BETA, "no-deadline-beta"), (ALPHA, "no-deadline-alpha")] {
        let created = create(
            &cloneset_api(version).await,
            cloneset(version, name, none.clone()),
        )
        .await;
        assert_eq!(created.unwrap()["spec"]["progressDeadlineSeconds"], i32::MAX);
    }
}

#[tokio::test]
async fn cloneset_defaults_are_set() {
    let (alpha, beta) = (cloneset_api(ALPHA).await, cloneset_api(BETA).await);
    let created = create(&beta, cloneset(BETA, "filled-in", json!({})))
        .await
        .unwrap();
    let spec = &created["spec"];
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
    let v1alpha1_strategy =
        json!({ "type": "ReCreate", "partition": 0, "maxUnavailable": "20%", "maxSurge": 0 });
    assert_eq!(
        get(&alpha, "filled-in").await["spec"]["updateStrategy"],
        v1alpha1_strategy
    );
    let created = create(&alpha, cloneset(ALPHA, "filled-in-old", json!({})))
        .await
        .unwrap();
    assert_eq!(created["spec"]["updateStrategy"], v1alpha1_strategy);
}

#[tokio::test]
async fn valid_limits_pass_and_selector_is_immutable() {
    let sets = cloneset_api(BETA).await;
    for (index, limits) in [
        json!({ "maxUnavailable": 0, "maxSurge": "1%" }),
        json!({ "partition": "12.5%", "maxUnavailable": "100%" }),
        json!({ "partition": 5000, "podUpdatePolicy": "InPlaceOnly", "maxSurge": "0%" }),
        json!({ "inPlaceUpdateStrategy": { "imagePreDownloadParallelism": "10" } }),
    ]
    .into_iter()
    .enumerate()
    {
        create(
            &sets,
            cloneset(BETA, &format!("good-{index}"), update_strategy(BETA, limits)),
        )
        .await
        .unwrap();
    }
    let idle = json!({ "replicas": 0, "updateStrategy": { "rollingUpdate": { "maxUnavailable": 0 } } });
    create(&sets, cloneset(BETA, "idle", idle)).await.unwrap();
    assert_denied(
        merge(&sets, "idle", json!({ "spec": { "replicas": 1 } })).await,
        "maxUnavailable and maxSurge are both 0",
    );
    // An autoscaler cannot fix the limits.
    shared_cluster()
        .plane
        .kubectl(&["scale", "clone/idle", "--replicas=2"])
        .unwrap();
    let on_delete = json!({ "updateStrategy": { "type": "OnDelete" } });
    create(&sets, cloneset(BETA, "on-delete", on_delete))
        .await
        .unwrap();
    let change = json!({ "spec": {
        "selector": { "matchLabels": { "b": "c" } },
        "template": { "metadata": { "labels": { "b": "c" } } },
    } });
    assert_denied(
        merge(&sets, "good-0", change).await,
        "spec.selector cannot be changed",
    );
}

#[tokio::test]
async fn scale_subresource_works() {
    let sets = cloneset_api(BETA).await;
    create(&sets, cloneset(BETA, "scaled", json!({}))).await.unwrap();
    let counts = json!({ "replicas": 1, "readyReplicas": 0, "availableReplicas": 0, "updatedReplicas": 1,
        "updatedReadyReplicas": 0, "labelSelector": "app=a" });
    merge_status(&sets, "scaled", json!({ "status": counts }))
        .await
        .unwrap();
    let plane = &shared_cluster().plane;
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

/// A v1alpha1 client and a v1beta1 client take turns.
#[tokio::test]
async fn clonesets_convert_between_versions() {
    let (alpha, beta) = (cloneset_api(ALPHA).await, cloneset_api(BETA).await);
    let mut object = cloneset(
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
async fn delete_protection_of_clonesets() {
    let sets = cloneset_api(BETA).await;
    let label =
        |value: &str| json!({ "metadata": { "labels": { "policy.kruise.io/delete-protection": value } } });
    let alpha = crate::cloneset::cloneset_api(ALPHA).await;
    let delete_by =
        async |sets: &Api<DynamicObject>| match sets.delete("protected", &DeleteParams::default()).await {
            Ok(_) => Ok(Value::Null),
            Err(why) => Err(why.to_string()),
        };
    let delete = || delete_by(&sets);
    create(&sets, cloneset(BETA, "protected", json!({})))
        .await
        .unwrap();
    merge(&sets, "protected", label("Always")).await.unwrap();
    let denial = "forbidden by ResourcesProtectionDeletion for policy.kruise.io/delete-protection=Always";
    assert_denied(delete().await, denial);
    assert_denied(delete_by(&alpha).await, denial);
    merge(&sets, "protected", label("Cascading")).await.unwrap();
    assert_denied(
        delete().await,
        "and replicas 1>0; remove the label, or scale CloneSet protected to 0",
    );
    merge(&sets, "protected", json!({ "spec": { "replicas": 0 } }))
        .await
        .unwrap();
    delete().await.unwrap();
    create(&sets, cloneset(BETA, "protected", json!({})))
        .await
        .unwrap();
    merge(&sets, "protected", label("other")).await.unwrap();
    delete().await.unwrap();
}
