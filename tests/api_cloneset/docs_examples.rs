//! The examples of `docs/user/cloneset.md`, in their order: applied and reconciled.

use std::collections::BTreeMap;

use kruise_api::cloneset::CloneSet;
use serde_json::Value;

use crate::fixture::Fixture;
use crate::test_cluster::shared_cluster;

/// A block of YAML, and what follows `yaml` on its first line: the reason of condition Progressing that it leads to,
/// and the CloneSet that it patches.
struct Example {
    yaml: String,
    reason: String,
    set: String,
}

fn examples() -> Vec<Example> {
    let path = format!("{}/../docs/user/cloneset.md", env!("CARGO_MANIFEST_DIR"));
    let text = std::fs::read_to_string(path).unwrap();
    let blocks = text.split("\n```yaml").skip(1).map(|rest| {
        let (waiting_text, rest) = rest.split_once('\n').unwrap();
        let mut waiting_text = waiting_text.split_whitespace().map(str::to_owned);
        Example {
            yaml: rest.split("\n```").next().unwrap().to_owned(),
            reason: waiting_text.next().unwrap_or("CloneSetAvailable".to_owned()),
            set: waiting_text.next().unwrap_or("web".to_owned()),
        }
    });
    blocks.collect()
}

/// The message of condition Progressing once it has that reason.
async fn wait_for_progressing(fixture: &Fixture, name: &str, reason: &str, waiting_text: &str) -> String {
    let progressing = |set: &CloneSet| {
        let conditions = set.status.iter().flat_map(|s| &s.conditions);
        let mut matching = conditions.filter(|c| c.type_ == "Progressing");
        matching.next().cloned()
    };
    let is_waiting = |set: &CloneSet| {
        let mut conditions = set.status.iter().flat_map(|s| &s.conditions);
        conditions.any(|c| c.type_ == "Waiting" && c.message.contains(waiting_text))
    };
    let reached = |set: &CloneSet| {
        progressing(set).is_some_and(|c| c.reason == reason) && (waiting_text.is_empty() || is_waiting(set))
    };
    let set = fixture.wait_status(name, "as the page says", reached).await;
    progressing(&set).unwrap().message
}

/// Whether the autoscaler exists and refers to an existing CloneSet.
async fn autoscaler_is_applied(fixture: &Fixture, printed: &Value) -> bool {
    let scalers = fixture.api("autoscaling", "v2", "HorizontalPodAutoscaler");
    let name = printed["metadata"]["name"].as_str().unwrap();
    let stored = scalers.get(name).await.unwrap();
    let target = &stored.data["spec"]["scaleTargetRef"];
    let set = target["name"].as_str().unwrap();
    let scale = fixture.sets().get_scale(set).await.unwrap();
    *target == printed["spec"]["scaleTargetRef"] && scale.spec.is_some_and(|spec| spec.replicas.is_some())
}

#[tokio::test]
async fn cloneset_docs_examples_take_effect() {
    let fixture = Fixture::new(shared_cluster(), "page").await;
    let examples = examples();
    let mut kinds = BTreeMap::<String, usize>::new();
    for Example { yaml, reason, set } in examples {
        let object: Value = serde_yaml::from_str(&yaml).unwrap();
        let kind = object["kind"].as_str();
        *kinds.entry(kind.unwrap_or("a patch").to_owned()).or_default() += 1;
        let name = match kind {
            None => {
                fixture.patch_set(&set, object).await;
                set
            }
            Some(kind) => {
                let file = tempfile::NamedTempFile::with_suffix(".yaml").unwrap();
                std::fs::write(file.path(), &yaml).unwrap();
                let namespace = format!("--namespace={}", fixture.namespace);
                let apply = ["apply", &namespace, "-f", file.path().to_str().unwrap()];
                fixture.cluster.plane.kubectl(&apply).unwrap();
                if kind != "CloneSet" {
                    // No metrics here: `tests/node_rollout/autoscaling.rs` tests real scaling.
                    assert_eq!(
                        (kind, autoscaler_is_applied(&fixture, &object).await),
                        ("HorizontalPodAutoscaler", true)
                    );
                    continue;
                }
                object["metadata"]["name"].as_str().unwrap().to_owned()
            }
        };
        let waiting_text = match (name.as_str(), reason.as_str()) {
            ("tuned", "CloneSetUpdated") => {
                "container app: the change of its environment is not confirmed yet"
            }
            ("careful", "CloneSetUpdated") => "hook inPlaceUpdate: finalizer example.com/drain to be removed",
            _ => "",
        };
        // Condition Progressing needs a deadline.
        let deadline = serde_json::json!({ "spec": { "progressDeadlineSeconds": 3600 } });
        fixture.patch_set(&name, deadline).await;
        wait_for_progressing(&fixture, &name, &reason, waiting_text).await;
    }
    let expected = [("CloneSet", 6), ("HorizontalPodAutoscaler", 1), ("a patch", 13)];
    assert_eq!(
        kinds,
        expected.map(|(kind, count)| (kind.to_owned(), count)).into()
    );
    for reason in [
        "SuccessfulUpdatePodInPlace",
        "SuccessfulUpdatePodReCreate",
        "CreatedImagePullJob",
    ] {
        fixture.wait_event(reason, "web").await;
    }
}
