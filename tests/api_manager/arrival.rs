//! Nodes that have just come, and have no NodeImage yet.

use kruise_api::image_pull_job::ImagePullJob;
use kruise_api::node_image::NodeImage;
use kube::api::Api;
use serde_json::json;

use crate::manager::Manager;
use crate::world::{Answer, World, answer, asked, completed, create, job, jobs, node, until};

#[tokio::test]
async fn a_job_waits_for_the_nodeimage_of_a_node_that_has_just_become_ready() {
    let world = World::new();
    let mut manager = Manager::somewhere_with(
        &world.plane,
        "kruise-manager",
        &["--nodeimage-creation-delay=20s".into()],
    );
    manager.start().unwrap();
    manager.until_it_says("leading");
    let admin = world.admin().await;
    let images = Api::<NodeImage>::all(admin.client.clone());
    node(&admin, "fresh", json!({ "pool": "new" }), true).await;
    node(&admin, "ill", json!({ "pool": "new" }), false).await;
    let selectors = [
        ("all", json!({})),
        ("named", json!({ "names": ["fresh"] })),
        ("labelled", json!({ "matchLabels": { "pool": "new" } })),
    ];
    for (name, selector) in &selectors {
        let spec = json!({ "image": format!("{name}:1"), "selector": selector, "parallelism": 9 });
        create(&jobs(&admin), job(name, spec)).await;
    }
    let waits = |job: &ImagePullJob| {
        let conditions = job.status.iter().flat_map(|s| &s.conditions);
        let mut messages = conditions.map(|c| c.message.as_str());
        messages.any(|message| message == "waiting for the NodeImage of fresh")
    };
    for (name, _) in &selectors {
        let job = until(&jobs(&admin), name, "waiting", waits).await;
        assert!(!completed(&job), "{name} has ended without its node");
    }
    assert!(
        images.get_opt("fresh").await.unwrap().is_none(),
        "the job waited for nothing"
    );
    for image in ["all", "named", "labelled"] {
        asked(&admin, "fresh", image, "1").await;
    }
    answer(&admin, "fresh", Answer::Succeeded).await;
    for (name, _) in &selectors {
        let status = until(&jobs(&admin), name, "ended", completed)
            .await
            .status
            .unwrap();
        assert_eq!((status.desired, status.succeeded), (1, 1), "{name}: {status:?}");
    }
}
