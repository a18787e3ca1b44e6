//! The examples of the manual, as a user would apply them.

use serde_json::Value;
use testbed::wait;

use crate::workloads::shared_cluster;

#[tokio::test]
async fn examples_of_the_manual_are_accepted_in_their_order() {
    let test = shared_cluster().await;
    let plane = &test.cluster.node.plane;
    let root = concat!(env!("CARGO_MANIFEST_DIR"), "/..");
    let manual = std::fs::read_to_string(format!("{root}/docs/user/sidecarset.md")).unwrap();
    let blocks = manual
        .split("```yaml\n")
        .skip(1)
        .filter_map(|rest| rest.split("```").next());
    let examples = ["sidecarset", "sidecarset-hot-upgrade"]
        .map(|name| std::fs::read_to_string(format!("{root}/deploy/examples/{name}.yaml")).unwrap());
    let objects: Vec<&str> = blocks.chain(examples.iter().map(String::as_str)).collect();
    assert!(objects.len() > 8, "{}", objects.len());
    for object in &objects {
        let applied = plane.apply(object);
        applied.unwrap_or_else(|why| panic!("{why:#}\n{object}"));
        // A later example names the revision of an earlier one.
        wait::until("the status of all sets", wait::WAIT_TIMEOUT, || {
            let sets: Value = serde_json::from_str(&plane.kubectl(&["get", "sidecarsets", "-o", "json"])?)?;
            let mut sets = sets["items"].as_array().into_iter().flatten();
            let current = |set: &Value| {
                set["status"]["observedGeneration"] == set["metadata"]["generation"]
                    && set["status"]["latestRevision"].is_string()
            };
            Ok(sets.all(current).then_some(()))
        })
        .unwrap();
    }
    for object in &objects {
        let name = object
            .lines()
            .find_map(|line| line.strip_prefix("  name: "))
            .unwrap();
        if object.contains("kind: SidecarSet") {
            plane
                .kubectl(&["delete", "sidecarset", name, "--ignore-not-found"])
                .unwrap();
        }
    }
}
