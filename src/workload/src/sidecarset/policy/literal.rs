//! Values as CEL literals.

use kruise_api::cel::string;
use serde_json::Value;

use super::error::Unsupported;

/// Larger integers are floating-point numbers after the policy, which the API server refuses with status 500.
const MAX_INTEGER: u64 = 1 << 53;

/// The literal of a JSON value. Members are wrapped, because CEL allows no list or map of several types.
pub(super) fn value(value: &Value, field: &str) -> Result<String, Unsupported> {
    let wrapped = |inner: &Value, field: &str| Ok(format!("dyn({})", self::value(inner, field)?));
    Ok(match value {
        Value::Null => "null".to_owned(),
        Value::Bool(value) => value.to_string(),
        Value::String(text) => string(text),
        Value::Number(number) => {
            let size = number.as_i64().map(i64::unsigned_abs);
            if size.is_none_or(|size| size > MAX_INTEGER) {
                return Err(Unsupported::new(field, "is no integer below 2^53"));
            }
            number.to_string()
        }
        Value::Array(items) => {
            let items = items
                .iter()
                .enumerate()
                .map(|(at, item)| wrapped(item, &format!("{field}[{at}]")));
            let items: Vec<String> = items.collect::<Result<_, Unsupported>>()?;
            format!("[{}]", items.join(", "))
        }
        Value::Object(fields) => {
            let fields = fields.iter().map(|(name, inner)| {
                let inner = wrapped(inner, &format!("{field}.{name}"))?;
                Ok(format!("{}: {inner}", string(name)))
            });
            let fields: Vec<String> = fields.collect::<Result<_, Unsupported>>()?;
            format!("{{{}}}", fields.join(", "))
        }
    })
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use serde_json::json;

    use super::*;

    #[test]
    fn values_become_literals() {
        let value_of = json!({ "a'": ["x\"\\\n", 1, -2, true, null, {}], "é": "😀\0" });
        assert_eq!(
            value(&value_of, "f").unwrap(),
            r#"{'a\'': dyn([dyn('x"\\\u000a'), dyn(1), dyn(-2), dyn(true), dyn(null), dyn({})]), '\u00e9': dyn('\U0001f600\u0000')}"#
        );
        for number in [
            json!(9_007_199_254_740_993_u64),
            json!(1.5),
            json!(u64::MAX),
            json!(i64::MIN),
        ] {
            let error = value(&json!({ "a": [number] }), "f").unwrap_err();
            assert_eq!(error.to_string(), "f.a[0] is no integer below 2^53");
        }
    }
}
