//! The examples of `docs/cloneset.md`, in their order: applied, and acted upon.

use kruise::api::cloneset::CloneSet;
use serde_json::Value;

use crate::field::Field;
use crate::world::world;

/// A block of YAML, and what the word after `yaml` says: the reason of condition Progressing that it leads to, and
/// which CloneSet it is a patch of.
struct Example {
    yaml: String,
    reason: String,
    set: String,
}

fn examples() -> Vec<Example> {
    let path = format!("{}/docs/cloneset.md", env!("CARGO_MANIFEST_DIR"));
    let text = std::fs::read_to_string(path).unwrap();
    let blocks = text.split("\n```yaml").skip(1).map(|rest| {
        let (words, rest) = rest.split_once('\n').unwrap();
        let mut words = words.split_whitespace().map(str::to_owned);
        Example {
            yaml: rest.split("\n```").next().unwrap().to_owned(),
            reason: words.next().unwrap_or("CloneSetAvailable".to_owned()),
            set: words.next().unwrap_or("web".to_owned()),
        }
    });
    blocks.collect()
}

/// The message of condition Progressing once it has that reason.
async fn told(field: &Field, name: &str, reason: &str, words: &str) -> String {
    let progressing = |set: &CloneSet| {
        let conditions = set.status.iter().flat_map(|s| &s.conditions);
        let mut of = conditions.filter(|c| c.type_ == "Progressing");
        of.next().cloned()
    };
    let said =
        |set: &CloneSet| progressing(set).is_some_and(|c| c.reason == reason && c.message.contains(words));
    let set = field.status(name, "as the page says", said).await;
    progressing(&set).unwrap().message
}

#[tokio::test]
async fn the_page_s_examples_do_what_it_says() {
    let field = Field::new(world(), "page").await;
    let examples = examples();
    assert!(examples.len() > 15, "{}", examples.len());
    for Example { yaml, reason, set } in examples {
        let object: Value = serde_yaml::from_str(&yaml).unwrap();
        let name = match object["kind"].as_str() {
            None => {
                field.edit(&set, object).await;
                set
            }
            Some(kind) => {
                let file = tempfile::NamedTempFile::with_suffix(".yaml").unwrap();
                std::fs::write(file.path(), &yaml).unwrap();
                let namespace = format!("--namespace={}", field.namespace);
                let apply = ["apply", &namespace, "-f", file.path().to_str().unwrap()];
                field.world.plane.kubectl(&apply).unwrap();
                if kind != "CloneSet" {
                    continue;
                }
                object["metadata"]["name"].as_str().unwrap().to_owned()
            }
        };
        let words = match (name.as_str(), reason.as_str()) {
            ("tuned", "CloneSetUpdated") => "container app: its environment is not known to be new",
            ("careful", "CloneSetUpdated") => {
                "hook inPlaceUpdate: finalizer example.com/drain to be taken off"
            }
            _ => "",
        };
        told(&field, &name, &reason, words).await;
    }
    for reason in [
        "SuccessfulUpdatePodInPlace",
        "SuccessfulUpdatePodReCreate",
        "CreatedImagePullJob",
    ] {
        field.event(reason, "web").await;
    }
}
