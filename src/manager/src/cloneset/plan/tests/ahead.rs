//! What is pulled ahead, and what is not.

use serde_json::{Value, json};

use super::cases::settle;
use super::histories::{container, rolling, spec};
use super::world::World;
use crate::cloneset::plan::{Act, Plan};
use kruise_api::keys;

/// Five Pods at rest, of two containers, and a template that says what its images are pulled with.
fn five() -> World {
    let mut spec = spec(false, false);
    let template = &mut spec["template"];
    template["metadata"]["annotations"] = json!({ "example.io/mirror": "near" });
    template["spec"]["imagePullSecrets"] = json!([{ "name": "one" }, { "name": "two" }]);
    let side = json!({ "name": "side", "image": "side:1" });
    template["spec"]["containers"].as_array_mut().unwrap().push(side);
    let mut world = World::new(spec);
    settle(&mut world);
    world
}

fn jobs(plan: &Plan) -> Vec<Value> {
    let jobs = plan.acts.iter().filter_map(|act| match act {
        Act::CreateJob(job) => Some(json!(job)),
        _ => None,
    });
    jobs.collect()
}

#[test]
fn a_job_pulls_as_the_strategy_and_the_template_say() {
    let mut world = five();
    let ahead = json!({ "imagePreDownloadParallelism": "7", "imagePreDownloadTimeoutSeconds": 77 });
    rolling(&mut world, json!({ "inPlaceUpdateStrategy": ahead }));
    container(&mut world, "image", json!("app:2"));
    let jobs = jobs(&world.reconcile().1);
    let update = world.revisions.last().unwrap().name.clone();
    assert_eq!(jobs.len(), 1, "the other image is the same: {jobs:?}");
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

/// The labels that the update revision of a world gets in a pass, and how many jobs are made for it.
fn ahead(mut world: World) -> (Vec<&'static str>, usize) {
    let plan = world.reconcile().1;
    let update = &world.revisions.last().unwrap().name;
    let labels = plan.acts.iter().filter_map(|act| match act {
        Act::LabelRevision { name, label } if name == update => Some(*label),
        _ => None,
    });
    (labels.collect(), jobs(&plan).len())
}

#[test]
fn nothing_is_pulled_ahead_where_it_is_no_help() {
    let with = |replicas: i32, limits: Value, field: &str| {
        let mut world = five();
        world.edit(&json!({ "replicas": replicas }));
        settle(&mut world);
        rolling(&mut world, limits);
        container(&mut world, "image", json!("app:2"));
        if field != "image" {
            container(&mut world, field, json!(["other"]));
        }
        ahead(world)
    };
    let ignored = (vec![keys::IMAGE_PRE_DOWNLOAD_IGNORED], 0);
    let none = json!({});
    assert_eq!(with(3, none.clone(), "image"), ignored, "there are few Pods");
    let recreate = json!({ "podUpdatePolicy": "ReCreate" });
    assert_eq!(with(5, recreate, "image"), ignored, "each is another Pod");
    assert_eq!(with(5, none.clone(), "command"), ignored, "not in place");
    for all in [json!("100%"), json!(5)] {
        let at_once = json!({ "maxUnavailable": all, "partition": 0 });
        assert_eq!(with(5, at_once, "image"), ignored, "all are updated at once");
    }

    let pulled = (vec![], 1);
    assert_eq!(with(4, none, "image"), pulled);
    let only = json!({ "podUpdatePolicy": "InPlaceOnly" });
    assert_eq!(with(5, only, "image"), pulled);
    assert_eq!(with(5, json!({ "maxUnavailable": 4 }), "image"), pulled);
    let some_later = json!({ "maxUnavailable": "100%", "partition": 1 });
    assert_eq!(with(5, some_later, "image"), pulled);
}
