//! Each field of each kind, in both versions, with what should not be in it. The fields are those of the schemas, so new
//! ones are among them.

use futures::{StreamExt, future, stream};
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
        json!([{}]),
        json!({ "?": "../x" }),
        deep,
    ];
    match schema["type"].as_str() {
        Some("array") => all.push(json!([])),
        Some("object") => all.push(json!({})),
        _ => {}
    }
    let any = schema["x-kubernetes-int-or-string"] == true;
    if any || schema["type"] == "integer" {
        all.extend([json!(0), json!(-1), json!(1.5), json!(1e300)]);
        let ends = [
            i64::from(i32::MAX),
            i64::from(i32::MAX) + 1,
            i64::from(i32::MIN),
            i64::MAX,
            i64::MIN,
        ];
        all.extend(ends.map(Value::from));
    }
    if is_text(schema) {
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
    }
    all
}

fn is_text(schema: &Value) -> bool {
    schema["type"] == "string" || schema["x-kubernetes-int-or-string"] == true
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

/// One value in one field.
struct Attempt {
    version: String,
    name: String,
    field: Field,
    object: Value,
}

impl Attempt {
    fn new(kind: &str, version: &str, number: usize, field: Field, value: Value) -> Self {
        let mut object = json!({ "spec": good(kind, number) });
        put(&mut object, &field.path, value);
        Self {
            version: version.to_owned(),
            name: format!("{}-{version}-{number}", kind.to_lowercase()),
            field,
            object,
        }
    }

    /// Whether it was accepted; whoever is refused learns of the field.
    async fn make(mut self, cluster: &Cluster, kind: &str) -> Option<String> {
        let objects = Objects::ours(cluster, &self.version, kind);
        let done = if kind == "NodeImage" {
            // There is one, and each patch of it may meet another one.
            loop {
                let done = objects.merge(NODE, &self.object).await;
                if !done
                    .as_ref()
                    .is_err_and(|words| words.contains("the object has been modified"))
                {
                    break done;
                }
            }
        } else {
            self.object["metadata"] = json!({ "name": self.name });
            objects.make(&self.object).await
        };
        let Err(words) = done else {
            return Some(self.name);
        };
        let object: String = self.object.to_string().chars().take(500).collect();
        let words: String = words.chars().take(2000).collect();
        // What is too deep is read by nobody, so nobody can say where it is.
        let named = self.field.is_named_in(&words) || words.contains("may be nested");
        assert!(named, "{:?} of {object}: {words}", self.field.path);
        None
    }
}

/// The fields of `spec` in each version.
fn fields(kind: &str) -> Vec<(String, Field)> {
    let crds = kruise::api::crds();
    let crd = crds.into_iter().find(|crd| crd.spec.names.kind == kind).unwrap();
    let crd = serde_json::to_value(crd).unwrap();
    let mut all = Vec::new();
    for version in crd["spec"]["versions"].as_array().unwrap() {
        let name = version["name"].as_str().unwrap();
        let mut fields = Vec::new();
        let spec = &version["schema"]["openAPIV3Schema"]["properties"]["spec"];
        walk(spec, &[Step::Field("spec".into())], &mut fields);
        assert!(fields.len() > 10, "{kind} {name} has {} fields", fields.len());
        all.extend(fields.into_iter().map(|field| (name.to_owned(), field)));
    }
    all
}

/// Tries everything in every field of `spec`.
async fn try_all(kind: &'static str) {
    let world = world().await;
    let admin = world.admin().await;
    let (mut light, mut heavy) = (Vec::new(), Vec::new());
    for (version, field) in fields(kind) {
        for value in hostile(&field.schema) {
            // As many Pods as that would be made, one after the other.
            let many = value.as_i64().is_some_and(|number| number > 100);
            if many && field.path.last() == Some(&Step::Field("replicas".into())) {
                continue;
            }
            light.push(Attempt::new(kind, &version, light.len(), field.clone(), value));
        }
        if is_text(&field.schema) {
            let number = 1_000_000 + heavy.len();
            let large = "a".repeat(1 << 20).into();
            heavy.push(Attempt::new(kind, &version, number, field, large));
        }
    }
    let (count, admin) = (light.len(), &admin);
    let asked = stream::iter(light).map(|attempt| attempt.make(admin, kind));
    let mut accepted: Vec<String> = asked
        .buffer_unordered(AT_A_TIME)
        .filter_map(future::ready)
        .collect()
        .await;
    assert!(
        !accepted.is_empty() && accepted.len() < count,
        "{} of {count} were accepted",
        accepted.len()
    );
    for attempt in heavy {
        accepted.extend(attempt.make(admin, kind).await);
    }
    world.still_works(&format!("after-{}", kind.to_lowercase())).await;
    // What is left of this is not what the next test is about.
    let objects = Objects::ours(admin, "v1beta1", kind);
    if kind == "NodeImage" {
        objects
            .merge(NODE, &json!({ "spec": { "images": null } }))
            .await
            .unwrap();
        return;
    }
    let removed = stream::iter(&accepted).map(|name| objects.remove(name));
    removed.buffer_unordered(AT_A_TIME).collect::<()>().await;
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
