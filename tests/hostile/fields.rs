//! Each field of each kind, in both versions, with what should not be in it. The fields are those of the schemas, so new
//! ones are among them.

use futures::{StreamExt, stream};
use kruise::cluster::Cluster;
use serde_json::{Value, json};

use crate::world::{NODE, Objects, clone_set, target, world};

/// Objects that are created at a time.
const AT_A_TIME: usize = 8;

/// One step from an object to a field of it.
#[derive(Clone, Debug, PartialEq)]
enum Step {
    Field(String),
    Item,
    Entry,
}

/// A field and its schema, without those below it.
#[derive(Clone, Debug)]
struct Field {
    path: Vec<Step>,
    schema: Value,
}

impl Field {
    /// Whether the words name the field, or one that it is in.
    fn is_named_in(&self, words: &str) -> bool {
        let names = self.path.iter().filter_map(|step| match step {
            Step::Field(name) => Some(name.as_str()),
            _ => None,
        });
        let mut names: Vec<&str> = names.filter(|name| *name != "spec").collect();
        if names.is_empty() {
            names.push("spec");
        }
        names.iter().any(|name| words.contains(name))
    }
}

fn walk(schema: &Value, path: &[Step], found: &mut Vec<Field>) {
    let below = |step| [path, &[step]].concat();
    for (name, child) in schema["properties"].as_object().into_iter().flatten() {
        walk(child, &below(Step::Field(name.clone())), found);
    }
    for (keyword, step) in [("items", Step::Item), ("additionalProperties", Step::Entry)] {
        if schema[keyword].is_object() {
            walk(&schema[keyword], &below(step), found);
        }
    }
    let schema = schema.clone();
    found.push(Field {
        path: path.to_vec(),
        schema,
    });
}

/// The object with `value` at the end of the path; what is missing on the way is made.
fn put(object: &mut Value, path: &[Step], value: Value) {
    let Some((first, rest)) = path.split_first() else {
        *object = value;
        return;
    };
    match first {
        Step::Field(name) => put(entry(object, name), rest, value),
        Step::Entry => {
            let known = object
                .as_object()
                .and_then(|fields| fields.keys().next().cloned());
            put(
                entry(object, &known.unwrap_or_else(|| "k".to_owned())),
                rest,
                value,
            );
        }
        Step::Item => {
            if object.as_array().is_none_or(Vec::is_empty) {
                *object = json!([null]);
            }
            put(&mut object[0], rest, value);
        }
    }
}

fn entry<'a>(object: &'a mut Value, name: &str) -> &'a mut Value {
    if !object.is_object() {
        *object = json!({});
    }
    &mut object[name]
}

/// What may be tried in a field of this schema: what is no value of its type, and the ends of its type.
fn hostile(schema: &Value) -> Vec<Value> {
    let deep = (0..100).fold(json!(1), |inner, _| json!([{ "a": inner }]));
    let mut all = vec![
        json!(true),
        json!("x"),
        json!(5),
        json!([]),
        json!({}),
        json!([{}]),
        json!({ "?": "../x" }),
        deep,
    ];
    let any = schema["x-kubernetes-int-or-string"] == true;
    if any || schema["type"] == "integer" {
        all.extend([json!(0), json!(-1), json!(1.5), json!(1e300)]);
        all.extend(
            [
                i64::from(i32::MAX),
                i64::from(i32::MAX) + 1,
                i64::from(i32::MIN),
                i64::MAX,
                i64::MIN,
            ]
            .map(Value::from),
        );
    }
    if any || schema["type"] == "string" {
        let texts = [
            "",
            "x?y=",
            "../x",
            "a/b",
            "\u{1}\n\u{1b}[31m",
            "9999-12-31T23:59:59Z",
            "-1%",
            "99999999999999999999%",
        ];
        all.extend(texts.map(Value::from));
        all.push("a".repeat(1 << 20).into());
    }
    all
}

/// A spec that is good but for what is tried. NodeImage has that of an image, which is added to the node's.
fn good(kind: &str, number: usize) -> Value {
    match kind {
        "CloneSet" => clone_set("fields", 0),
        "ImagePullJob" => json!({ "image": "hostile:1", "completionPolicy": {} }),
        "NodeImage" => {
            json!({ "images": { "hostile": { "tags": [{ "tag": "1", "pullPolicy": { "ttlSecondsAfterFinished": 1 } }] } } })
        }
        "ContainerRecreateRequest" => {
            json!({ "podName": target(number), "containers": [{ "name": "main" }] })
        }
        kind => panic!("{kind} is new: give it a good spec here"),
    }
}

async fn ask(
    cluster: &Cluster,
    version: &str,
    kind: &str,
    number: usize,
    mut object: Value,
) -> Result<(), String> {
    let objects = Objects::ours(cluster, version, kind);
    if kind == "NodeImage" {
        return objects.merge(NODE, &object).await;
    }
    object["metadata"] = json!({ "name": format!("{}-{version}-{number}", kind.to_lowercase()) });
    objects.make(&object).await
}

/// Tries everything in every field of `spec`; whoever is refused learns of the field.
async fn try_all(kind: &'static str) {
    let admin = world().await.admin().await;
    let crd = kruise::api::crds()
        .into_iter()
        .find(|crd| crd.spec.names.kind == kind)
        .unwrap();
    let crd = serde_json::to_value(crd).unwrap();
    let (mut attempts, mut accepted) = (Vec::new(), 0);
    for version in crd["spec"]["versions"].as_array().unwrap() {
        let name = version["name"].as_str().unwrap();
        let mut fields = Vec::new();
        let spec = &version["schema"]["openAPIV3Schema"]["properties"]["spec"];
        walk(spec, &[Step::Field("spec".into())], &mut fields);
        assert!(fields.len() > 10, "{kind} {name} has {} fields", fields.len());
        for field in fields {
            for value in hostile(&field.schema) {
                // As many Pods as that would be made, one after the other.
                let many = value.as_i64().is_some_and(|number| number > 100);
                if many && field.path.last() == Some(&Step::Field("replicas".into())) {
                    continue;
                }
                attempts.push((name, field.clone(), value));
            }
        }
    }
    let count = attempts.len();
    let asked = stream::iter(attempts.into_iter().enumerate()).map(|(number, (version, field, value))| {
        let mut object = json!({ "spec": good(kind, number) });
        put(&mut object, &field.path, value);
        let admin = &admin;
        async move {
            (
                ask(admin, version, kind, number, object.clone()).await,
                field,
                object,
            )
        }
    });
    // There is one NodeImage, and each patch of it would meet another one.
    let at_a_time = if kind == "NodeImage" { 1 } else { AT_A_TIME };
    let mut asked = std::pin::pin!(asked.buffer_unordered(at_a_time));
    while let Some((result, field, object)) = asked.next().await {
        match result {
            Ok(()) => accepted += 1,
            Err(words) => {
                let object: String = object.to_string().chars().take(500).collect();
                let words: String = words.chars().take(2000).collect();
                // What is too deep is read by nobody, so nobody can say where it is.
                assert!(
                    field.is_named_in(&words) || words.contains("may be nested"),
                    "{:?} of {object}: {words}",
                    field.path
                );
            }
        }
    }
    assert!(
        accepted > 0 && accepted < count,
        "{accepted} of {count} were accepted"
    );
    world()
        .await
        .still_works(&format!("after-{}", kind.to_lowercase()))
        .await;
}

#[tokio::test]
async fn a_cloneset_with_any_value_in_any_field_is_refused_by_field_or_does_no_harm() {
    try_all("CloneSet").await;
}

#[tokio::test]
async fn a_job_with_any_value_in_any_field_is_refused_by_field_or_does_no_harm() {
    try_all("ImagePullJob").await;
}

#[tokio::test]
async fn a_recreate_request_with_any_value_in_any_field_is_refused_by_field_or_does_no_harm() {
    try_all("ContainerRecreateRequest").await;
}

#[tokio::test]
async fn a_node_image_with_any_value_in_any_field_is_refused_by_field_or_does_no_harm() {
    try_all("NodeImage").await;
}
