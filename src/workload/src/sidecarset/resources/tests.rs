#![allow(clippy::unwrap_used)]
use proptest::prelude::*;
use serde_json::{Value, json};

use super::aggregate::ResourcesError;
use super::*;
use kruise_api::sidecarset::ResourcesPolicy;

#[test]
fn expressions_match_go() {
    let vectors = include_str!("../../../../../tests/data/go/resources-expr.jsonl");
    assert_eq!(vectors.lines().count(), 300);
    let mut differences = Vec::new();
    for (at, line) in vectors.lines().enumerate() {
        let vector: Value = serde_json::from_str(line).unwrap();
        let expression = vector["expr"].as_str().unwrap();
        let value = Quantity::parse(vector["value"].as_str().unwrap()).unwrap();
        let out = &vector["out"];
        let ours = evaluate(expression, value);
        let agrees = match &ours {
            // Go keeps the text of a quantity that it does not compute with: `5.m`.
            Ok(quantity) => {
                let theirs = Quantity::from_json(&out["quantity"]).map(|theirs| theirs.to_string());
                out["milli"].as_i64().map(i128::from) == Some(quantity.milli())
                    && theirs == Some(quantity.to_string())
            }
            Err(_) => out["error"].is_string(),
        };
        let valid = Resource::ALL.map(|resource| {
            (
                resource.as_str().to_owned(),
                validate(expression, resource).is_ok().into(),
            )
        });
        let valid = Value::Object(valid.into_iter().collect());
        if !agrees || valid != vector["validAs"] {
            differences.push(format!("{}: {ours:?} {valid} {line}", at + 1));
        }
    }
    assert!(differences.is_empty(), "{}", differences.join("\n"));
}

fn value(expression: &str, value: &str) -> Result<String, ExpressionError> {
    evaluate(expression, Quantity::parse(value).unwrap()).map(|quantity| quantity.to_string())
}

#[test]
fn documented_expressions_have_their_results() {
    for (expression, bound, result) in [
        ("max(cpu*50%, 50m)", "600m", "300m"),
        ("max(cpu*50%, 50m)", "400m", "200m"),
        ("100foo", "1", "0"),
        ("1000M + memory", "24M", "1024M"),
        ("memory", "1024Ki", "1Mi"),
        ("memory*2", "1Ki", "2Ki"),
        ("memory", "1e3", "1e3"),
        ("cpu", "1e-1", "100e-3"),
        ("cpu", "100n", "100n"),
    ] {
        assert_eq!(value(expression, bound).as_deref(), Ok(result), "{expression}");
    }
    assert_eq!(value("memory-100Mi", "1Mi"), Err(ExpressionError::Negative));
    assert!(validate("memory-100Mi", Resource::Memory).is_err());
    assert!(validate("cpu*cpu", Resource::Cpu).is_ok());
}

#[test]
fn hostile_expressions_are_refused() {
    let nested =
        |open: &str, depth: usize, close: &str| format!("{}1{}", open.repeat(depth), close.repeat(depth));
    assert_eq!(value(&nested("(", 63, ")"), "1").as_deref(), Ok("1"));
    assert_eq!(value(&nested("(", 64, ")"), "1"), Err(ExpressionError::TooDeep));
    assert_eq!(value(&nested("-", 2000, ""), "1"), Err(ExpressionError::TooDeep));
    assert_eq!(value(&"1+".repeat(3000), "1"), Err(ExpressionError::TooLong));
    for expression in [
        "9999P*1e300",
        "9P*9000",
        "1e308*10",
        "cpu*1e308*1e308",
        "1e308*10-1e308*10",
    ] {
        assert_eq!(
            value(expression, "1"),
            Err(ExpressionError::OutOfRange),
            "{expression}"
        );
    }
    for expression in [
        "",
        " ",
        "1 2",
        "cpu cpu",
        "@",
        "é",
        "1é",
        "max(1,2",
        "max(1,2,3)",
        "+1",
        "2*",
        ")",
    ] {
        assert!(value(expression, "1").is_err(), "{expression}");
    }
}

fn policy(mode: &str, regex: &str, expressions: Value) -> ResourcesPolicy {
    serde_json::from_value(json!({
        "targetContainersMode": mode,
        "targetContainersNameRegex": regex,
        "resourcesExpr": expressions,
    }))
    .unwrap()
}

#[test]
fn containers_are_added_up_or_compared() {
    let web =
        json!({ "name": "web", "resources": { "limits": { "cpu": "200m" }, "requests": { "cpu": 1 } } });
    let log = json!({ "name": "log", "resources": { "limits": { "cpu": "400m", "memory": "1Gi" } } });
    let both = [&web, &log];
    let expressions = json!({
        "limits": { "cpu": "max(cpu*50%, 50m)", "memory": "1Gi" },
        "requests": { "cpu": "cpu", "memory": "memory" },
    });
    let computed = |mode, regex| resources(&policy(mode, regex, expressions.clone()), &both);
    assert_eq!(
        computed("sum", ".*").unwrap(),
        json!({ "limits": { "cpu": "300m" }, "requests": { "cpu": "1", "memory": "0" } })
    );
    assert_eq!(computed("max", "").unwrap()["limits"], json!({ "cpu": "200m" }));
    assert_eq!(
        computed("max", "^l").unwrap(),
        json!({ "limits": { "cpu": "200m", "memory": "1Gi" }, "requests": { "cpu": "0", "memory": "0" } })
    );
    assert_eq!(
        computed("sum", "x"),
        Err(ResourcesError::NoTarget("x".to_owned()))
    );
    assert_eq!(computed("avg", "."), Err(ResourcesError::Mode("avg".to_owned())));
    for regex in ["(a", "a{2,1}", "(a{1000}){1000}"] {
        assert!(
            matches!(computed("sum", regex), Err(ResourcesError::Regex(_))),
            "{regex}"
        );
    }
    // More than a GiB while it is compiled.
    assert!(target_regex(&r"\pL".repeat(200_000)).is_err());
    let broken = json!({ "name": "web", "resources": { "requests": { "cpu": [] } } });
    assert!(resources(&policy("sum", ".", expressions.clone()), &[&broken]).is_err());
}

proptest! {
    /// Any text gives a quantity that is not negative and reads back as the same amount, or an error.
    #[test]
    fn any_text_is_evaluated(
        words in prop::collection::vec(
            prop_oneof![
                "[-+*/(),]", "cpu|memory|max\\(|min\\(|1e30|9P|0|1i|%|50%|1e-|é|@| ", "\\PC{0,3}",
                "[0-9.]{1,20}[eE%+a-zA-Z-]{0,3}",
            ],
            0..40,
        ),
        nanos in any::<i64>(),
    ) {
        let text = words.concat();
        if let Ok(quantity) = evaluate(&text, Quantity::parse(&format!("{nanos}n")).unwrap()) {
            prop_assert!(!quantity.is_negative());
            let read = Quantity::parse(&quantity.to_string()).unwrap();
            prop_assert_eq!(read.to_string(), quantity.to_string());
        }
        let _ = validate(&text, Resource::Cpu);
        let _ = target_regex(&text);
    }
}
