//! Revisions whose data is no Pod template: the API server stores any object, so a user who may write revisions may
//! write that.

use proptest::prelude::*;
use serde_json::{Value, json};

use super::fake_cluster::FakeCluster;
use super::random_histories::{clone_set_spec, edit_container, edit_rolling_update};
use super::scenarios::settle;
use crate::cloneset::plan::{Action, plan};

/// Parts of a revision that a plan reads.
const PARTS: [&str; 15] = [
    "",
    "/spec",
    "/spec/template",
    "/spec/template/metadata",
    "/spec/template/metadata/labels",
    "/spec/template/metadata/annotations",
    "/spec/template/metadata/finalizers",
    "/spec/template/spec",
    "/spec/template/spec/containers",
    "/spec/template/spec/containers/0",
    "/spec/template/spec/containers/0/env",
    "/spec/template/spec/readinessGates",
    "/spec/template/spec/volumes",
    "/spec/template/spec/topologySpreadConstraints",
    "/spec/template/spec/imagePullSecrets",
];

fn any_json() -> impl Strategy<Value = Value> {
    let leaf = prop_oneof![
        Just(Value::Null),
        any::<bool>().prop_map(Value::from),
        any::<i64>().prop_map(Value::from),
        "[a-z]{0,3}".prop_map(Value::from),
    ];
    leaf.prop_recursive(3, 12, 3, |inner| {
        let key = prop_oneof![
            Just("name"),
            Just("image"),
            Just("env"),
            Just("metadata"),
            Just("spec"),
            Just("labels"),
            Just("containers"),
        ];
        prop_oneof![
            prop::collection::vec(inner.clone(), 0..3).prop_map(Value::from),
            prop::collection::btree_map(key, inner, 0..3).prop_map(|map| json!(map)),
        ]
    })
}

/// A cluster with two revisions; the Pods have the first, and one of them is missing.
fn two_revisions() -> FakeCluster {
    let mut cluster = FakeCluster::new(clone_set_spec(false, true));
    cluster.edit(&json!({ "replicas": 3 }));
    let annotations = json!({ "apps.kruise.io/container-launch-priority": "Ordered" });
    cluster.edit(&json!({ "template": {
        "metadata": { "annotations": annotations, "finalizers": [] },
        "spec": { "readinessGates": [], "volumes": [], "topologySpreadConstraints": [], "imagePullSecrets": [] },
    } }));
    edit_container(&mut cluster, "env", json!([]));
    settle(&mut cluster);
    edit_rolling_update(&mut cluster, json!({ "partition": 3 }));
    edit_container(&mut cluster, "image", json!("app:2"));
    settle(&mut cluster);
    let name = cluster.pods.keys().next().unwrap().clone();
    cluster.delete_pod(&name);
    cluster
}

proptest! {
    #[test]
    fn invalid_revision_data_breaks_no_plan(part in 0..PARTS.len(), with in any_json(), newest in any::<bool>()) {
        let mut cluster = two_revisions();
        let last = cluster.revisions.len() - 1;
        let data = &mut cluster.revisions[if newest { last } else { last - 1 }].data;
        *data.pointer_mut(PARTS[part]).unwrap() = with;
        for partition in [3, 0] {
            edit_rolling_update(&mut cluster, json!({ "partition": partition }));
            // A change of the spec creates its own revision, so the invalid one is passed to the plan.
            let planned = plan(&cluster.observe(), cluster.now);
            for action in &planned.actions {
                if let Action::CreatePod { pod, .. } = action {
                    prop_assert!(pod["spec"].is_object());
                }
            }
        }
    }
}
