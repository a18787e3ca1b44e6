//! CloneSets, revisions, Pods and claims that OpenKruise left, as recorded: ours takes over, and their manifests are
//! applied again.

use crate::manager::Manager;
use crate::world::World;
use support::charts::Charts;
use support::converted::{ALL, until_converted};

const WITH_DEFAULTS: &str = include_str!("../data/takeover/objects.jsonl");
const WITHOUT_DEFAULTS: &str = include_str!("../data/takeover/objects-without-defaults.jsonl");

/// Lets our manager take over, applies everything again, and changes an image.
async fn take_over(gates: &str, recorded: &[(&'static str, &str)]) {
    let world = World::new();
    let (plane, admin) = (&world.plane, world.admin().await);
    let mut all = Vec::new();
    for (namespace, objects) in recorded {
        let charts = Charts::new(plane, &admin, namespace, "v1beta1");
        charts.restore(objects).await;
        let left = charts.kept().await;
        all.push((charts, left));
    }
    let flags = [
        "--enable-leader-election=false".to_owned(),
        format!("--feature-gates={gates}"),
    ];
    let mut manager = Manager::somewhere_with(plane, "kruise-manager", &flags);
    manager.start().unwrap();
    until_converted(plane, &ALL);
    for (charts, left) in &all {
        charts.settled("takeover").await;
        assert_eq!(charts.kept().await, *left, "{}: takeover", charts.namespace);
        charts.nothing_changes(plane, None, "the same again").await;
        let image = "registry.example.com/next:2";
        charts.image_changes_in_place(plane, image, "another image").await;
        charts
            .nothing_changes(plane, Some(image), "that image again")
            .await;
    }
}

#[tokio::test]
async fn manifests_applied_again_after_a_takeover_change_nothing() {
    let recorded = [("left-filled", WITH_DEFAULTS), ("left-bare", WITHOUT_DEFAULTS)];
    take_over("", &recorded).await;
}

#[tokio::test]
async fn manifests_applied_again_after_a_takeover_without_defaults_change_nothing() {
    take_over("TemplateNoDefaults=true", &[("kept-bare", WITHOUT_DEFAULTS)]).await;
}
