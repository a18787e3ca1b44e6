//! Which images are pre-pulled.

use serde_json::{Value, json};

use super::fake_cluster::FakeCluster;
use super::random_histories::{clone_set_spec, edit_container, edit_rolling_update};
use super::scenarios::settle;
use crate::cloneset::plan::{Action, Plan};
use kruise_api::keys;

/// Five settled Pods with two containers, and a template with pull secrets.
fn five_settled_pods() -> FakeCluster {
    let mut spec = clone_set_spec(false, false);
    let template = &mut spec["template"];
    template["metadata"]["annotations"] = json!({ "example.io/mirror": "near" });
    template["spec"]["imagePullSecrets"] = json!([{ "name": "one" }, { "name": "two" }]);
    let side = json!({ "name": "side", "image": "side:1" });
    template["spec"]["containers"].as_array_mut().unwrap().push(side);
    let mut cluster = FakeCluster::new(spec);
    settle(&mut cluster);
    cluster
}

fn jobs(plan: &Plan) -> Vec<Value> {
    let jobs = plan.actions.iter().filter_map(|action| match action {
        Action::CreateJob(job) => Some(json!(job)),
        _ => None,
    });
    jobs.collect()
}

#[test]
fn pre_download_job_follows_strategy_and_template() {
    let mut cluster = five_settled_pods();
    let pre_download = json!({ "imagePreDownloadParallelism": "7", "imagePreDownloadTimeoutSeconds": 77 });
    edit_rolling_update(&mut cluster, json!({ "inPlaceUpdateStrategy": pre_download }));
    edit_container(&mut cluster, "image", json!("app:2"));
    let jobs = jobs(&cluster.reconcile().1);
    let update = cluster.revisions.last().unwrap().name.clone();
    assert_eq!(jobs.len(), 1, "the other image does not change: {jobs:?}");
    let (meta, spec) = (&jobs[0]["metadata"], &jobs[0]["spec"]);
    assert_eq!(meta["name"], format!("{update}-app"));
    assert_eq!(meta["ownerReferences"][0]["uid"], "set");
    assert_eq!(spec["parallelism"], "7");
    assert_eq!(
        spec["pullPolicy"],
        json!({ "timeoutSeconds": 77, "backoffLimit": 1 })
    );
    assert_eq!(spec["pullSecrets"], json!(["one", "two"]));
    let hash = update.strip_prefix("s-").unwrap();
    let sandbox = json!({
        "labels": { "app": "x", keys::REVISION_HASH: hash },
        "annotations": { "example.io/mirror": "near" },
    });
    assert_eq!(spec["sandboxConfig"], sandbox);
    assert_eq!(spec["podSelector"]["matchLabels"], json!({ "app": "x" }));
}

/// Each job has the labels and annotations of the template, which may take much memory.
#[test]
fn jobs_of_a_large_template_are_created_one_after_another() {
    let mut cluster = five_settled_pods();
    cluster.memory = usize::MAX;
    let mut containers = cluster.set["spec"]["template"]["spec"]["containers"].clone();
    containers[0]["image"] = json!("app:2");
    containers[1]["image"] = json!("side:2");
    cluster.edit(&json!({ "template": { "spec": { "containers": containers } } }));
    let created = [(); 3].map(|()| jobs(&cluster.reconcile().1).len());
    assert_eq!(created, [1, 1, 0]);
    assert!(cluster.revisions.last().unwrap().pre_downloaded);
}

/// The labels that the update revision gets in one reconcile, and the number of jobs created for it.
fn pre_download_result(mut cluster: FakeCluster) -> (Vec<&'static str>, usize) {
    let plan = cluster.reconcile().1;
    let update = &cluster.revisions.last().unwrap().name;
    let labels = plan.actions.iter().filter_map(|action| match action {
        Action::LabelRevision { name, label } if name == update => Some(*label),
        _ => None,
    });
    (labels.collect(), jobs(&plan).len())
}

#[test]
fn pre_download_is_skipped_where_useless() {
    let with = |replicas: i32, limits: Value, field: &str| {
        let mut cluster = five_settled_pods();
        cluster.edit(&json!({ "replicas": replicas }));
        settle(&mut cluster);
        edit_rolling_update(&mut cluster, limits);
        edit_container(&mut cluster, "image", json!("app:2"));
        if field != "image" {
            edit_container(&mut cluster, field, json!(["other"]));
        }
        pre_download_result(cluster)
    };
    let ignored = (vec![keys::IMAGE_PRE_DOWNLOAD_IGNORED], 0);
    let none = json!({});
    assert_eq!(with(3, none.clone(), "image"), ignored, "there are few Pods");
    let recreate = json!({ "podUpdatePolicy": "ReCreate" });
    assert_eq!(with(5, recreate, "image"), ignored, "each Pod is recreated");
    assert_eq!(with(5, none.clone(), "command"), ignored, "not in place");
    for all in [json!("100%"), json!(5)] {
        let at_once = json!({ "maxUnavailable": all, "partition": 0 });
        assert_eq!(with(5, at_once, "image"), ignored, "all are updated at once");
    }

    let pre_downloaded = (vec![], 1);
    assert_eq!(with(4, none, "image"), pre_downloaded);
    let only = json!({ "podUpdatePolicy": "InPlaceOnly" });
    assert_eq!(with(5, only, "image"), pre_downloaded);
    assert_eq!(with(5, json!({ "maxUnavailable": 4 }), "image"), pre_downloaded);
    let some_later = json!({ "maxUnavailable": "100%", "partition": 1 });
    assert_eq!(with(5, some_later, "image"), pre_downloaded);
}
