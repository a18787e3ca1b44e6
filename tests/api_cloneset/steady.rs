//! Nothing is written where nothing has changed, and a manager that dies in the middle is followed by one that goes on.

use kruise_api::image_pull_job::ImagePullJob;
use kube::api::{Api, Patch};
use serde_json::json;

use crate::field::{Field, identities};
use crate::waits;
use crate::world::{World, until, world};

/// What the manager has asked the API server for in this namespace: verb, resource, name. Its watches are apart, as are
/// the lists of a whole kind that each begins with.
fn read(field: &Field) -> Vec<String> {
    let all = field.world.plane.reads_of_manager().unwrap();
    assert!(!all.is_empty(), "reads are logged");
    let here = |event: &&serde_json::Value| event["objectRef"]["namespace"] == field.namespace.as_str();
    let words = |event: &serde_json::Value| {
        let object = &event["objectRef"];
        format!("{} {} {}", event["verb"], object["resource"], object["name"])
    };
    all.iter().filter(here).map(words).collect()
}

/// What each new CloneSet costs once: is there a Pod to adopt?
const ORPHANS: &str = r#""list" "pods" null"#;

#[tokio::test]
async fn nothing_is_written_nor_read_when_nothing_has_changed() {
    let field = Field::new(world(), "steady").await;
    field.set("web", json!({})).await;
    field.settled("web").await;
    let of_web = || {
        let all = field.writes().into_iter();
        all.filter(|(_, resource, name)| resource != "events" && name.contains("web"))
            .collect::<Vec<_>>()
    };
    // The audit log comes a moment after the watch; with another's writes in it, it has all that came before.
    field.set("earlier", json!({ "replicas": 1 })).await;
    field.settled("earlier").await;
    let before = of_web();
    for pod in field.pods_of("web").await {
        let name = pod["metadata"]["name"].as_str().unwrap();
        let note = Patch::Merge(json!({ "metadata": { "annotations": { "example.com/note": "x" } } }));
        field
            .pods()
            .patch(name, &Default::default(), &note)
            .await
            .unwrap();
    }
    field
        .edit(
            "web",
            json!({ "metadata": { "annotations": { "example.com/note": "x" } } }),
        )
        .await;
    // What comes after these changes has been looked at after them.
    field.set("other", json!({ "replicas": 1 })).await;
    field.settled("other").await;
    assert_eq!(of_web(), before);
    assert_eq!(read(&field), [ORPHANS; 3]);
}

#[tokio::test]
async fn a_change_of_one_cloneset_is_nothing_to_the_others() {
    const SETS: u64 = 12;
    const CHANGES: u64 = 30;
    let world: &'static World = Box::leak(Box::new(World::new()));
    let mut manager = world.manager("kruise-manager");
    manager.start().unwrap();
    let field = Field::new(world, "others").await;
    for at in 0..SETS {
        field.set(&format!("web-{at}"), json!({ "replicas": 1 })).await;
    }
    for at in 0..SETS {
        field.settled(&format!("web-{at}")).await;
    }
    let one = field.pods_of("web-1").await.remove(0);
    let name = one["metadata"]["name"].as_str().unwrap();
    let (begin, read_before) = (manager.passes(), world.plane.reads_of_manager().unwrap().len());
    for change in 1..=CHANGES {
        let before = manager.passes();
        let note = json!({ "metadata": { "annotations": { "example.com/note": change.to_string() } } });
        let note = Patch::Merge(note);
        field
            .pods()
            .patch(name, &Default::default(), &note)
            .await
            .unwrap();
        let looked = async || (manager.passes() > before).then_some(());
        waits::until("its CloneSet is looked at", &|| manager.tail(), looked).await;
    }
    // What was left of the beginning may come among them.
    let passes = manager.passes() - begin;
    assert!(
        passes < SETS * CHANGES / 2,
        "{passes} passes over {SETS} CloneSets for {CHANGES} changes of one's Pod"
    );
    assert_eq!(read(&field), [ORPHANS; SETS as usize]);
    // A watch that ended begins anew, and the certificates are looked after: that is not for each change.
    let others = world.plane.reads_of_manager().unwrap().split_off(read_before);
    assert!(others.len() < CHANGES as usize, "{others:#?}");
}

#[tokio::test]
async fn a_rollout_goes_on_with_the_next_manager() {
    let world: &'static World = Box::leak(Box::new(World::new()));
    let mut manager = world.manager("kruise-manager");
    manager.start().unwrap();
    let field = Field::new(world, "next").await;
    let rolling = json!({ "podUpdatePolicy": "InPlaceIfPossible", "maxUnavailable": 1 });
    let spec = json!({ "replicas": 8, "updateStrategy": { "rollingUpdate": rolling } });
    field.set("web", spec).await;
    field.settled("web").await;
    let before = field.pods_of("web").await;
    for (image, from) in [("example.com/app:2", 2), ("example.com/app:3", 5)] {
        field.image("web", image).await;
        let midst = move |set: &kruise_api::cloneset::CloneSet| {
            set.status.as_ref().is_some_and(|s| s.updated_replicas >= from)
        };
        field.status("web", "some are updated", midst).await;
        manager.kill().unwrap();
        manager.start().unwrap();
        field.settled("web").await;
        let after = field.pods_of("web").await;
        assert_eq!(identities(&before), identities(&after));
        assert!(
            after
                .iter()
                .all(|pod| pod["spec"]["containers"][0]["image"] == image)
        );
    }
    let revisions = field.api("apps", "v1", "ControllerRevision");
    assert_eq!(revisions.list(&Default::default()).await.unwrap().items.len(), 3);
    until(&field.sets(), "web", "at its end", |set| {
        let status = set.status.as_ref().unwrap();
        status.current_revision == status.update_revision
    })
    .await;
}

#[tokio::test]
async fn of_two_managers_the_other_goes_on_when_one_dies() {
    let world: &'static World = Box::leak(Box::new(World::new()));
    let mut one = world.manager("manager-one");
    one.start().unwrap();
    one.until_it_says("leading");
    let mut other = world.manager("manager-other");
    other.start().unwrap();
    other.until_it_says("standing by");
    let field = Field::new(world, "two").await;
    let rolling = json!({ "podUpdatePolicy": "InPlaceIfPossible", "maxUnavailable": 1 });
    let spec = json!({ "replicas": 6, "updateStrategy": { "rollingUpdate": rolling } });
    field.set("web", spec).await;
    field.settled("web").await;
    let before = identities(&field.pods_of("web").await);
    field.image("web", "example.com/app:2").await;
    let midst =
        |set: &kruise_api::cloneset::CloneSet| set.status.as_ref().is_some_and(|s| s.updated_replicas >= 2);
    field.status("web", "some are updated", midst).await;
    one.kill().unwrap();
    field.settled("web").await;
    other.until_it_says("leading");
    assert_eq!(identities(&field.pods_of("web").await), before);
    assert!(field.pod_writes().len() <= 6 * 5, "{:?}", field.pod_writes());
}

#[tokio::test]
async fn a_job_that_ends_slowly_is_deleted_once() {
    let field = Field::new(world(), "slow-job").await;
    let rolling = |partition: i32| json!({ "updateStrategy": { "rollingUpdate": { "partition": partition, "maxUnavailable": 1 } } });
    let mut spec = rolling(3);
    spec["replicas"] = json!(4);
    field.set("web", spec).await;
    field.settled("web").await;
    field.image("web", "example.com/app:2").await;
    field.event("CreatedImagePullJob", "web").await;
    let jobs: Api<ImagePullJob> = Api::namespaced(field.admin.client.clone(), &field.namespace);
    let job = jobs.list(&Default::default()).await.unwrap().items.remove(0);
    let job = job.metadata.name.unwrap();
    let finalizers = |list: &[&str]| Patch::Merge(json!({ "metadata": { "finalizers": list } }));
    let hold = finalizers(&["example.com/hold"]);
    jobs.patch(&job, &Default::default(), &hold).await.unwrap();
    field.edit("web", json!({ "spec": rolling(0) })).await;
    until(&jobs, &job, "being deleted", |job: &ImagePullJob| {
        job.metadata.deletion_timestamp.is_some()
    })
    .await;
    // What comes after has been looked at after it.
    field.set("other", json!({ "replicas": 1 })).await;
    field.settled("other").await;
    let deletions = field
        .writes()
        .into_iter()
        .filter(|(verb, resource, name)| verb == "delete" && resource == "imagepulljobs" && *name == job);
    assert_eq!(deletions.count(), 1);
    jobs.patch(&job, &Default::default(), &finalizers(&[]))
        .await
        .unwrap();
}
